"""A server that speaks vLLM's control plane and holds its weights in a dict. No engine."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch
from aiohttp import web
from tiny_server import LoopThread

from megarl.bridge.group import WeightGroup, connect, open_group
from megarl.bridge.wire import message_bytes, unpack

HOST = "127.0.0.1"
ONE_TOKEN = {
    "choices": [
        {
            "token_ids": [7],
            "logprobs": {"content": [{"logprob": -0.5}]},
            "weight_versions": [{"version": "3", "start": 0, "end": 1}],
            "finish_reason": "length",
        }
    ]
}


class _Everything(set):
    def __contains__(self, path):
        return True


class FakeServer:
    """`workers` ranks of a weight group. Runs on the loop of a LoopThread."""

    def __init__(self, loop: LoopThread, *, workers: int = 1) -> None:
        self.workers = workers
        self.asked: list[str] = []
        """Every path, in the order of arrival."""
        self.bodies: list[dict] = []
        self.failing: dict[str, int] = {}
        """Path -> status to answer with instead."""
        self.failing_once: dict[str, int] = {}
        self.hanging: set[str] = set()
        """Paths that are answered only when the server closes."""
        self.hangs_from: str | None = None
        """The first request for this path hangs, and so does each that follows."""
        self.dropped = 0
        """How many of the next connections end without an answer."""
        self.groups: list[WeightGroup] = []
        self.weights: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]
        self._threads = ThreadPoolExecutor(workers)
        self._loop = loop
        self.address = loop.run(self._start())

    async def _start(self) -> str:
        self._closing = asyncio.Event()
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        return f"http://{HOST}:{self._runner.addresses[0][1]}"

    def close(self) -> None:
        self._loop.run(self._stop())
        for group in self.groups:
            group.leave()
        self._threads.shutdown()

    async def _stop(self) -> None:
        self._closing.set()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.asked.append(path)
        body = await request.json() if request.can_read_body else dict(request.query)
        self.bodies.append(body)
        if self.dropped:
            self.dropped -= 1
            request.transport.close()
            return web.Response()
        if path == self.hangs_from:
            self.hanging = _Everything()
        if path in self.hanging:
            await self._closing.wait()
        if status := self.failing.get(path, 0) or self.failing_once.pop(path, 0):
            return web.json_response({"error": {"message": "no"}}, status=status)
        if path == "/inference/v1/generate":
            return web.json_response(ONE_TOKEN)
        if path == "/collective_rpc":
            done = {"result": None} if body["method"] == "megarl_command" else None
            return web.json_response({"results": [done] * self.workers})
        if path == "/get_world_size":
            return web.json_response({"world_size": self.workers})
        if path == "/init_weight_transfer_engine":
            self.groups = await self._each_worker(self._join, body["init_info"])
        if path == "/update_weights":
            try:
                await self._each_worker(self._receive, body["update_info"])
            except (TimeoutError, RuntimeError) as error:
                return web.json_response({"error": str(error)}, status=500)
        return web.json_response({"path": path})

    async def _each_worker(self, function, info: dict) -> list:
        loop = asyncio.get_running_loop()
        calls = (
            loop.run_in_executor(self._threads, function, i, info) for i in range(self.workers)
        )
        return await asyncio.gather(*calls)

    @staticmethod
    def _join(worker: int, info: dict) -> WeightGroup:
        store = connect(info["master_address"], info["master_port"], info["timeout_s"])
        rank = info["rank_offset"] + worker
        return open_group(store, rank, info["world_size"], "cpu", info["timeout_s"])

    def _receive(self, worker: int, info: dict) -> None:
        size = message_bytes(info["dtypes"], info["shapes"])
        buffer = torch.empty(size, dtype=torch.uint8)
        self.groups[worker].broadcast(buffer).wait()
        message = unpack(buffer, info["names"], info["dtypes"], info["shapes"])
        self.weights[worker].update(message)
