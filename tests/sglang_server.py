"""A stand-in for SGLang: the routes of its HTTP API that mcore_rl calls, on plain transformers.

It keeps what SGLang 0.5.23 does where a client could be wrong about it; line numbers are those of
its wheel, in sglang/srt. The script of `write_python` starts it in
place of `python -m sglang.launch_server`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from examples.hf_server import HFServer
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.protocol import Completion, SamplingParams, ServerSpec

ROOT = Path(__file__).parents[1]
VERSION = "0.5.23"
_TOP_K_ALL = 1 << 30  # sampling/sampling_params.py:43


class Engine(HFServer):
    """The model, with SGLang's seeds, stops and pauses."""

    def __init__(self, model_path: str, context_length: int, dtype: str = "float32") -> None:
        super().__init__(ServerSpec(model_path, dtype, context_length, RolloutConfig(), seed=0))
        self.eos_ids = self._stop_ids
        self.versions = {0: "default"}

    async def swap(self, path: str, version: str) -> None:
        """Replace the weights."""
        await asyncio.to_thread(self._load_model, path, None)
        self._version += 1
        self.versions[self._version] = version

    async def pause(self) -> None:
        """End the call of generate; requests go on later, with keys and values made anew."""
        self._may_generate.hold("weights")
        async with self._model_lock:
            pass

    def resume(self) -> None:
        self._may_generate.release("weights")

    @torch.no_grad()
    def compute_log_probs(
        self, prompt_ids: list[int], completion: Completion, temperature: float
    ) -> list[float]:
        """Return log-probs with the temperature alone, as layers/sampler.py:275-315."""
        ids = torch.tensor([prompt_ids + completion.token_ids])
        logits = self._model(ids).logits[0, len(prompt_ids) - 1 : -1].float()
        table = (logits / (temperature or 1.0)).log_softmax(-1)
        return table[torch.arange(len(table)), completion.token_ids].tolist()


class FakeSGLang:
    """State of the server, and its routes.

    Attributes:
        calls: Route and body of each POST.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.engine = options, Engine(options.model_path, options.context_length)
        self.is_up, self.calls = False, []
        self.engine.versions[0] = options.weight_version
        self.running: dict[str, asyncio.Event] = {}
        self.is_paused, self.may_begin = False, asyncio.Event()
        self.may_begin.set()
        self.asleep: set[str] = set()

    async def start(self) -> None:
        """Load the weights; of load_format=dummy they are random."""
        await self.engine.start()
        if self.options.load_format == "dummy":
            for parameter in self.engine._model.parameters():
                torch.nn.init.normal_(parameter.data)
        self.is_up = True

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self.is_up else 503)

    async def server_info(self, _: Request) -> Response:
        return JSONResponse({**vars(self.options), "version": VERSION})

    async def model_info(self, _: Request) -> Response:
        config = json.loads(Path(self.options.model_path, "config.json").read_text())
        return JSONResponse(
            {
                "model_path": self.options.model_path,
                "weight_version": self.engine.versions[self.engine.weight_version],
                "architectures": config.get("architectures"),
                "preferred_sampling_params": self.options.preferred_sampling_params,
            }
        )

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        sampling, prompt_ids, rid = body["sampling_params"], body["input_ids"], body["rid"]
        top_k = sampling["top_k"] if sampling["top_k"] != -1 else _TOP_K_ALL
        temperature = sampling["temperature"]
        if temperature == 0:
            top_k = 1
        if body["return_sampling_mask"] and not top_k <= self.options.sampling_mask_max_tokens:
            return _refuse(f"return_sampling_mask requires finite top_k; got top_k={top_k}")
        limit = self.options.context_length - len(prompt_ids) - 1  # managers/scheduler.py:2714
        length = max(0, min(sampling["max_new_tokens"], limit))
        seed = sampling.get("sampling_seed")
        if not self.options.enable_deterministic_inference:
            seed = None
        elif seed is None:
            seed = 42  # sampling/sampling_batch_info.py:157
        params = SamplingParams(
            temperature=temperature,
            top_p=sampling["top_p"],
            top_k=0 if top_k == _TOP_K_ALL or temperature == 0 else top_k,
            stop=tuple(sampling["stop"]),
            max_tokens=length,
            seed=seed,
        )
        await self.may_begin.wait()
        if self.asleep:
            return _refuse("the memory is released")
        self.engine._stop_ids = self.engine.eos_ids | set(sampling["stop_token_ids"])
        ended = self.running[rid] = asyncio.Event()
        try:
            [completion] = await self.engine.submit(prompt_ids, params, request_id=rid)
            raw = await asyncio.to_thread(
                self._compute_raw_log_probs, prompt_ids, completion, temperature, params
            )
        finally:
            ended.set()
            del self.running[rid]
        return JSONResponse(self._build_reply(rid, body, completion, raw))

    def _compute_raw_log_probs(
        self,
        prompt_ids: list[int],
        completion: Completion,
        temperature: float,
        params: SamplingParams,
    ) -> list[float]:
        if params.top_p == 1 and not params.top_k:
            return completion.log_probs
        return self.engine.compute_log_probs(prompt_ids, completion, temperature)

    def _build_reply(
        self, rid: str, body: dict[str, Any], completion: Completion, raw: list[float]
    ) -> dict[str, Any]:
        reason: dict[str, Any] = {
            "type": completion.finish_reason
        }  # managers/schedule_batch.py:284
        if completion.finish_reason == "stop":
            reason["matched"] = completion.stop_string or completion.token_ids[-1]
        elif completion.finish_reason == "abort":
            reason |= {"message": "Aborted", "status_code": None, "err_type": None}
        else:
            reason["length"] = len(completion.token_ids)
        spans, start = [], 0  # utils/weight_versions.py:99
        for number, group in groupby(completion.weight_versions):
            end = start + len(list(group))
            version = self.engine.versions[number]
            spans.append({"version": version, "start": start, "end": end})
            start = end
        meta = {
            "id": rid,
            "finish_reason": reason,
            "completion_tokens": len(completion.token_ids),
            "weight_versions": spans,
            "output_token_logprobs": [
                [log_prob, token, None]
                for log_prob, token in zip(raw, completion.token_ids, strict=True)
            ],
        }
        if body["return_sampling_mask"]:
            meta["output_token_sampling_logprobs"] = completion.log_probs
        return {"text": "", "output_ids": completion.token_ids, "meta_info": meta}

    async def abort_request(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        for name in [name for name in self.running if rid and name.startswith(rid)]:
            await self.engine.abort(name)  # managers/scheduler.py:5688
        return Response()

    async def pause_generation(self, request: Request) -> Response:
        self.is_paused = True
        self.may_begin.clear()
        assert (await request.json())["mode"] == "retract"
        await self.engine.pause()
        return JSONResponse({"status": "ok"})

    async def continue_generation(self, _: Request) -> Response:
        self.is_paused = False
        self.engine.resume()
        self.may_begin.set()
        return JSONResponse({"status": "ok"})

    async def update_weights_from_disk(self, request: Request) -> Response:
        body = await request.json()
        if not self.is_paused:  # managers/tokenizer_manager.py:2306
            await asyncio.gather(*(ended.wait() for ended in self.running.values()))
        if "weights" in self.asleep or body["load_format"] not in ("auto", "safetensors"):
            return JSONResponse({"success": False, "message": "no weights"}, 400)
        try:
            await self.engine.swap(body["model_path"], body["weight_version"])
        except Exception as error:  # noqa: BLE001 (SGLang says all)
            message = f"Failed to update weights: {error}."
            return JSONResponse({"success": False, "message": message}, 400)
        return JSONResponse({"success": True, "message": "", "num_paused_requests": 0})

    async def release_memory_occupation(self, request: Request) -> Response:
        if not self.options.enable_memory_saver or (self.running and not self.is_paused):
            return _refuse("release_memory_occupation should be called only when server is idle.")
        self.asleep |= set((await request.json())["tags"])
        return JSONResponse(None)

    async def resume_memory_occupation(self, request: Request) -> Response:
        for tag in (await request.json())["tags"]:
            self.asleep.remove(tag)
            if tag == "weights":  # the memory has no values
                for parameter in self.engine._model.parameters():
                    parameter.data.fill_(float("nan"))
        return JSONResponse(None)

    def build_app(self) -> Starlette:
        """Return the app; each method named here is a route."""

        async def check(request: Request, call_next: Any) -> Response:
            key, route = self.options.api_key, request.url.path
            given = request.headers.get("Authorization")
            if key and route != "/health" and given != f"Bearer {key}":  # utils/auth.py:108
                return JSONResponse({"error": "Unauthorized"}, 401)
            if request.method == "POST":
                self.calls.append((route, await request.json()))
            return await call_next(request)

        gets = "health", "server_info", "model_info"
        posts = (
            "generate", "abort_request", "pause_generation", "continue_generation",
            "update_weights_from_disk", "release_memory_occupation", "resume_memory_occupation",
        )  # fmt: skip
        routes = [Route(f"/{name}", getattr(self, name), methods=["GET"]) for name in gets]
        routes += [Route(f"/{name}", getattr(self, name), methods=["POST"]) for name in posts]
        app = Starlette(routes=routes)
        app.add_middleware(BaseHTTPMiddleware, dispatch=check)
        return app


def _refuse(message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, 400)


def build_parser() -> argparse.ArgumentParser:
    """Return a parser of the arguments of SGLang that the stand-in knows."""
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "api-key", "preferred-sampling-params", "dtype", "config"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--sampling-mask-max-tokens", type=int, default=4096)
    for name in ("port", "random-seed", "max-total-tokens", "tp-size", "max-running-requests"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--context-length", type=int, default=4096)
    flags = "enable-deterministic-inference", "enable-memory-saver", "skip-tokenizer-init"
    for name in flags:
        parser.add_argument(f"--{name}", action="store_true")
    return parser


async def run(fake: FakeSGLang, server: uvicorn.Server) -> None:
    """Serve until `server.should_exit`; the model loads meanwhile."""
    loading = asyncio.create_task(fake.start())
    await server.serve()
    loading.cancel()
    await fake.engine.close()


@contextlib.contextmanager
def serve(*words: str) -> Iterator[tuple[str, FakeSGLang]]:
    """Run a stand-in in a thread; yield its URL and itself."""
    options = build_parser().parse_args(words)
    config = uvicorn.Config("", host="127.0.0.1", port=0, log_level="error")
    server, fakes, error = uvicorn.Server(config), [], []

    async def work() -> None:
        fakes.append(FakeSGLang(options))
        config.app = fakes[0].build_app()
        await run(fakes[0], server)

    def main() -> None:
        try:
            asyncio.run(work())
        except BaseException as failure:  # the test shows it
            error.append(failure)
            raise

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    while not (server.started and fakes[0].is_up):
        assert not error, error
        thread.join(0.02)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", fakes[0]
    finally:
        server.should_exit = True
        thread.join(20)


def write_python(path: Path) -> Path:
    """Write a program that takes `-m sglang.launch_server` and starts the stand-in."""
    words = f"{sys.executable} {__file__}"
    path.write_text(f'#!/bin/sh\nshift 2\nPYTHONPATH={ROOT} exec {words} "$@"\n')
    path.chmod(0o755)
    return path


def main() -> None:
    options = build_parser().parse_args()
    for name, value in json.loads(Path(options.config).read_text()).items():
        setattr(options, name.replace("-", "_"), value)

    async def work() -> None:
        fake = FakeSGLang(options)
        app = fake.build_app()
        config = uvicorn.Config(app, host=options.host, port=options.port, log_level="error")
        await run(fake, uvicorn.Server(config))

    asyncio.run(work())


if __name__ == "__main__":
    main()
