"""Policy objectives as values made of parts: `Objective` names the parts, `OBJECTIVES` the known choices.

Legend: B completions (rows), N tokens that count, n_i those of row i, rho the policy ratio, A the advantage.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ._checks import check_choice, check_count, check_flag, check_number, check_positive

RATIO_LEVELS = ("token", "sequence", "sequence_token", "none")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
AGGREGATIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
)


class Surrogate(NamedTuple):
    """The parts that a surrogate may be combined with."""

    ratio_levels: tuple[str, ...]
    defaults: dict[str, float]
    """the parts that this surrogate alone uses, with their defaults"""


_CLIPS = {"clip_low": 0.2, "clip_high": 0.2}
SURROGATES = {
    "clip": Surrogate(("token", "sequence", "sequence_token"), _CLIPS),
    "cispo": Surrogate(("token", "sequence"), _CLIPS),
    "sapo": Surrogate(("token", "sequence", "sequence_token"), {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05}),
    "geometric": Surrogate(("sequence",), _CLIPS),
    "vespo": Surrogate(
        ("sequence",), {"vespo_k_pos": 2.0, "vespo_k_neg": 3.0, "vespo_lambda_pos": 3.0, "vespo_lambda_neg": 2.0}
    ),
    "logprob": Surrogate(("none",), {}),
}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A policy objective as a choice of parts. A combination without a meaning raises ValueError, which says why.

    A part that the surrogate does not use must stay None; one that it uses gets its default.
    """

    ratio_level: str = "token"
    """`token`: exp(lp - old). `sequence`: exp of its row mean (GSPO). `sequence_token`: the value of `sequence`, the
    gradient of each token (GSPO-token). `none`: no ratio. With a sequence ratio, `token_mean` weighs rows by length."""
    surrogate: str = "clip"
    """What is maximized, per token. `clip`: min(rho A, clip(rho) A). `cispo`: sg[clip(rho)] A lp. `sapo`: soft gate.
    `geometric`: A exp(row mean of the sign-aware clamped log-ratio). `vespo`: sg[phi(W)] A lp. `logprob`: A lp."""
    clip_low: float | None = None
    """rho is clipped below at 1 - clip_low; default 0.2. `geometric` clamps lp - old at -clip_low."""
    clip_high: float | None = None
    """rho is clipped above at 1 + clip_high; default 0.2. `geometric` clamps lp - old at clip_high."""
    clip_bounds: str = "relative"
    """`relative`: [1 - clip_low, 1 + clip_high]. `raw` (cispo only): [clip_low, clip_high] themselves."""
    dual_clip: float | None = None
    """c > 1 + clip_high: where A < 0 the ratio counts at most c times (TRL's `delta`, verl's `clip_ratio_c`)."""
    aggregation: str = "sequence_mean_token_mean"
    """`token_mean`: sum / N. `sequence_mean_token_mean`: mean over rows of sum_i / n_i. `sequence_mean_token_sum`: mean
    over rows of sum_i. `sequence_mean_token_sum_norm`: sum / (B max_completion_length)."""
    max_completion_length: int | None = None
    """the constant of `sequence_mean_token_sum_norm`, in tokens"""
    kl_coef: float = 0.0
    """weight of the KL to the reference"""
    kl_estimator: str = "k3"
    """of both KLs, with d = other - lp: `k1` -d (expected gradient zero), `k2` d^2/2, `k3` e^d - d - 1, `abs` |d|"""
    kl_bias_correction: bool = False
    """multiplies both KLs by rho, gradient included, so that they stay unbiased off policy"""
    mirror_coef: float = 0.0
    """weight of the KL to the old policy (arXiv 2503.06639, mirror descent); with kl_coef it is the two-KL scheme"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""
    sapo_tau_pos: float | None = None
    """SAPO's temperature where A > 0; default 1.0"""
    sapo_tau_neg: float | None = None
    """SAPO's temperature elsewhere; default 1.05"""
    vespo_k_pos: float | None = None
    """VESPO's k where A >= 0; default 2"""
    vespo_k_neg: float | None = None
    """VESPO's k where A < 0; default 3"""
    vespo_lambda_pos: float | None = None
    """VESPO's lambda where A >= 0; default 3"""
    vespo_lambda_neg: float | None = None
    """VESPO's lambda where A < 0; default 2"""

    def __post_init__(self) -> None:
        check_choice("ratio_level", self.ratio_level, RATIO_LEVELS)
        check_choice("surrogate", self.surrogate, SURROGATES)
        check_choice("clip_bounds", self.clip_bounds, ("relative", "raw"))
        check_choice("aggregation", self.aggregation, AGGREGATIONS)
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        for name in ("kl_coef", "mirror_coef"):
            check_number(name, getattr(self, name), at_least=0)
        check_number("entropy_coef", self.entropy_coef)
        check_flag("kl_bias_correction", self.kl_bias_correction)
        self._fill_in_defaults()
        self._refuse_combinations()

    def _fill_in_defaults(self) -> None:
        """Sets the defaults of the parts that this surrogate uses, and refuses those that it does not use."""
        used = SURROGATES[self.surrogate].defaults
        for name in sorted({name for surrogate in SURROGATES.values() for name in surrogate.defaults}):
            value = getattr(self, name)
            if name not in used:
                if value is not None:
                    raise ValueError(f"{name}={value!r} has no effect on surrogate={self.surrogate!r}; leave it None")
            elif value is None:
                object.__setattr__(self, name, used[name])
            elif name.startswith("clip"):
                check_number(name, value, at_least=0)
            else:
                check_positive(name, value)

    def _refuse_combinations(self) -> None:
        levels = SURROGATES[self.surrogate].ratio_levels
        if self.ratio_level not in levels:
            raise ValueError(
                f"surrogate={self.surrogate!r} is defined for ratio_level {' or '.join(map(repr, levels))}, "
                f"got {self.ratio_level!r}"
            )
        if self.kl_bias_correction and self.ratio_level == "none":
            raise ValueError(
                'kl_bias_correction=True multiplies the KL by the ratio, and ratio_level="none" has no ratio; '
                "set kl_bias_correction=False"
            )
        if self.dual_clip is not None:
            if self.surrogate != "clip":
                raise ValueError(
                    f"dual_clip={self.dual_clip!r} has no effect on surrogate={self.surrogate!r}; leave it None, or "
                    'use surrogate="clip"'
                )
            check_number("dual_clip", self.dual_clip)
            if not self.dual_clip > 1 + (self.clip_high or 0):
                raise ValueError(
                    f"dual_clip must exceed 1 + clip_high = {1 + (self.clip_high or 0)}, got {self.dual_clip!r}"
                )
        if self.clip_bounds == "raw":
            if self.surrogate != "cispo":
                raise ValueError(
                    f'clip_bounds="raw" belongs to surrogate="cispo", got surrogate={self.surrogate!r}; '
                    'use clip_bounds="relative"'
                )
            if not (self.clip_low or 0) <= 1 <= (self.clip_high or 0):
                raise ValueError(
                    f"raw bounds must enclose 1, got [{self.clip_low}, {self.clip_high}]; "
                    'bounds around 1 are clip_bounds="relative"'
                )
        if self.max_completion_length is not None:
            if self.aggregation != "sequence_mean_token_sum_norm":
                raise ValueError(
                    f"max_completion_length={self.max_completion_length!r} has no effect on "
                    f"aggregation={self.aggregation!r}; leave it None, or use "
                    'aggregation="sequence_mean_token_sum_norm"'
                )
            check_count("max_completion_length", self.max_completion_length)

    def replace(self, **parts: Any) -> "Objective":
        """The same objective with other values for the named parts; an unknown part raises TypeError."""
        return replace(self, **parts)


OBJECTIVES: dict[str, Objective] = {
    # DeepSeekMath, arXiv 2402.03300: mean over completions of token means. The paper names no clip; 0.2 as in PPO.
    "grpo": Objective(),
    # Token mean over the micro-batch at hand; with num_tokens of the whole step, the aggregation of dapo.
    "bnpo": Objective(aggregation="token_mean"),
    # arXiv 2503.20783: a constant divisor instead of n_i. Its advantages are not scaled (scale="none").
    "dr_grpo": Objective(aggregation="sequence_mean_token_sum_norm"),
    # arXiv 2503.14476: clip-higher 0.2 / 0.28, token mean over the step, no KL.
    "dapo": Objective(aggregation="token_mean", clip_low=0.2, clip_high=0.28),
    # arXiv 2507.18071: sequence ratio; clips 3e-4 / 4e-4, which belong to that ratio's scale.
    "gspo": Objective(ratio_level="sequence", clip_low=3e-4, clip_high=4e-4),
    "gspo_token": Objective(ratio_level="sequence_token", clip_low=3e-4, clip_high=4e-4),
    # arXiv 2511.20347: soft gate, temperatures 1.0 / 1.05, mean over completions of token means.
    "sapo": Objective(surrogate="sapo"),
    # arXiv 2506.13585: clipped, detached weight on the log-prob, token mean. The paper gives no bounds; 0.2 / 0.2 here.
    "cispo": Objective(surrogate="cispo", aggregation="token_mean"),
    # arXiv 2504.02546: no ratio, no clip, token mean.
    "gpg": Objective(ratio_level="none", surrogate="logprob", aggregation="token_mean"),
    # LUSPO: GSPO with each sequence weighted by its length. Clips 0.2 / 0.2 as TRL's default.
    "luspo": Objective(ratio_level="sequence", aggregation="sequence_mean_token_sum"),
    # VESPO: token mean; (k, lambda) = (2, 3) where A >= 0, else (3, 2), TRL's constants.
    "vespo": Objective(ratio_level="sequence", surrogate="vespo", aggregation="token_mean"),
    # GMPO: geometric mean of clamped token ratios. Clamps 0.2 / 0.2 as verl's default.
    "gmpo": Objective(ratio_level="sequence", surrogate="geometric"),
    # Williams 1992 on whole completions; RLOO when the advantages are leave-one-out.
    "reinforce": Objective(ratio_level="none", surrogate="logprob", aggregation="sequence_mean_token_sum"),
}
