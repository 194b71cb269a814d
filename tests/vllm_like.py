"""A server that speaks vLLM's dialect over loopback, with the tiny model behind it and faults to order."""

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

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.asked.append((path, body))
            if self.failures and path.startswith(self.fail_on):
                return self.failures.pop(0), {"error": {"message": "ordered"}}
            match path:
                case "/v1/models":
                    return 200, {"data": [{"id": name} for name in self.adapters]}
                case "/v1/load_lora_adapter" if not self.without_lora:
                    return self._load(body["lora_name"], Path(body["lora_path"]))
                case "/v1/unload_lora_adapter" if not self.without_lora:
                    known = self.adapters.pop(body["lora_name"], None) is not None
                    return (200, "Success") if known else (404, {"error": {"message": "no such adapter"}})
                case "/v1/completions" if body["model"] in self.adapters:
                    return 200, {"choices": [self.edit(c) for c in self._complete(body)]}
        return 404, {"error": {"message": f"{path}: not found"}}

    def _load(self, name: str, folder: Path) -> tuple[int, Any]:
        if name in self.adapters:
            return 400, {"error": {"message": "already loaded"}}
        self.adapters[name] = folder
        if not isinstance(self.weights, PeftModel):
            self.weights = PeftModel.from_pretrained(self.weights, folder).eval()
        tensors = load_file(folder / "adapter_model.safetensors")
        self.adapters[name] = tensors
        return 200, "Success"

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
        for _ in range(body["max_tokens"]):
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
        return choices[::-1]


def _append(choice: dict[str, Any], token: int, scores: Tensor, likeliest: int) -> None:
    kept = dict.fromkeys([*scores.topk(likeliest).indices.tolist(), token])
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
        status, answer = self.server.answer(self.path, body)
        if status == 0:
            self.close_connection = True
            return
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: object) -> None:
        pass
