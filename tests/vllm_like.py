"""A server that speaks vLLM's dialect over loopback, with the tiny model behind it and faults to order.

Its statuses, messages and fields are those that vLLM 0.32.0 was seen to answer with.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from tiny import model

BASE = "tiny"


class VllmLike(ThreadingHTTPServer):
    """Serves until `close`; what it was asked stands in `asked`, what it does wrong is set on it."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0, temperature_in_logprobs: bool = True) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.weights = model().eval()
        self.adapters: dict[str, Any] = {BASE: None}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.temperature_in_logprobs = temperature_in_logprobs
        self.failures: list[int] = []
        """statuses to answer with instead; 0 hangs up"""
        self.fail_on = "/"
        self.keeps_old_weights = False
        self.without_lora = False
        self.max_model_len = 256
        self.max_lora_rank = 16
        self.sees_folders = True
        self.key: str | None = None
        self.logprob_offset = 0.0
        self.edit = lambda choice: choice
        self._lock = threading.Lock()
        self._first: dict[str, Tensor] | None = None
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def forget(self) -> None:
        """As after a restart."""
        self.adapters = {BASE: None}

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, path: str, body: dict[str, Any], key: str | None) -> tuple[int, Any]:
        with self._lock:
            self.asked.append((path, body))
            if self.key is not None and key != f"Bearer {self.key}":
                return 401, {"error": "Unauthorized"}
            if self.failures and path.startswith(self.fail_on):
                return _error(self.failures.pop(0), "ordered")
            match path:
                case "/v1/models":
                    rooms = {name: self.max_model_len if name == BASE else None for name in self.adapters}
                    return 200, {"data": [{"id": name, "max_model_len": room} for name, room in rooms.items()]}
                case "/v1/load_lora_adapter" if not self.without_lora:
                    return self._load(body["lora_name"], Path(body["lora_path"]))
                case "/v1/unload_lora_adapter" if not self.without_lora:
                    name = body["lora_name"]
                    if self.adapters.pop(name, None) is None:
                        return _error(404, f"The lora adapter '{name}' cannot be found.")
                    return 200, f"Success: LoRA adapter '{name}' removed successfully."
                case "/v1/completions" if body["model"] not in self.adapters:
                    return _error(404, f"The model `{body['model']}` does not exist. Valid aliases: {BASE}.")
                case "/v1/completions":
                    return 200, {"choices": [self.edit(c) for c in self._complete(body)]}
        return 404, {"detail": "Not Found"}

    def _load(self, name: str, folder: Path) -> tuple[int, Any]:
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if not self.sees_folders:
            return _error(404, f"Loading lora {name} failed: No adapter found for {folder}")
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > self.max_lora_rank:
            reason = f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}."
            return _error(500, f"Call to add_lora method failed: Worker failed with error '{reason}'")
        if not isinstance(self.weights, PeftModel):
            self.weights = PeftModel.from_pretrained(self.weights, folder).eval()
        tensors = load_file(folder / "adapter_model.safetensors")
        self.adapters[name] = tensors
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    @torch.no_grad()
    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        tensors = self.adapters[body["model"]]
        if self.keeps_old_weights:
            self._first = tensors = self._first or tensors
        state = {name.replace(".weight", ".default.weight"): value for name, value in tensors.items()}
        self.weights.load_state_dict(state, strict=False)
        count, prompt, chance = body["n"], body["prompt"], torch.Generator().manual_seed(body["seed"])
        assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
        assert body["return_tokens_as_token_ids"]
        ids = torch.tensor([prompt] * count)
        choices = [
            {"index": i, "finish_reason": None, "logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": []}}
            for i in range(count)
        ]
        for _ in range(min(body["max_tokens"], self.max_model_len - len(prompt))):
            logits = self.weights(input_ids=ids).logits[:, -1].float()
            drawn = torch.multinomial((logits / body["temperature"]).softmax(-1), 1, generator=chance)
            scale = body["temperature"] if self.temperature_in_logprobs else 1.0
            scores = (logits / scale).log_softmax(-1) + self.logprob_offset
            for choice, token, row in zip(choices, drawn[:, 0].tolist(), scores, strict=True):
                if choice["finish_reason"] is None:
                    _append(choice, token, row, body["logprobs"])
                    choice["finish_reason"] = "stop" if token in body["stop_token_ids"] else None
            ids = torch.cat([ids, drawn], dim=1)
        for choice in choices:
            choice["finish_reason"] = choice["finish_reason"] or "length"
        return choices


def _error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "code": status}}


def _append(choice: dict[str, Any], token: int, scores: Tensor, likeliest: int) -> None:
    kept = dict.fromkeys([token, *scores.topk(likeliest).indices.tolist()])
    choice["logprobs"]["tokens"].append(f"token_id:{token}")
    choice["logprobs"]["token_logprobs"].append(float(scores[token]))
    choice["logprobs"]["top_logprobs"].append({f"token_id:{i}": float(scores[i]) for i in kept})


class _Handler(BaseHTTPRequestHandler):
    server: VllmLike

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        status, answer = self.server.answer(self.path, body, self.headers["authorization"])
        if status == 0:
            self.close_connection = True
            return
        text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        if not isinstance(answer, str):
            self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: object) -> None:
        pass
