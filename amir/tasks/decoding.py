"""Token ids to text, exactly: special tokens are kept, and no spaces are removed or moved.

A token that has only some bytes of a character is decoded as U+FFFD; `completion_ids` has what was sampled there.
"""

from collections.abc import Sequence
from typing import Any


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of a whole sequence."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def decode_continuation(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add after the tokens `before`.

    Decoders of SentencePiece's kind remove a space at the start of a sequence, which a continuation must keep. A
    tokenizer without a decoder joins its tokens with spaces, so there the tokens are decoded by themselves.
    """
    if not ids or getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None) is None:
        return decode(tokenizer, ids)
    start, joined = decode(tokenizer, before[-1:]), decode(tokenizer, [*before[-1:], *ids])
    return joined[len(start) :] if joined.startswith(start) else decode(tokenizer, ids)
