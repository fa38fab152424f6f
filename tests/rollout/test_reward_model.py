"""RewardModel against a server that answers what a test says: what is sent, read and counted."""

import asyncio
import contextlib
import json
import logging

import pytest
from aiohttp import web
from proxy_agents import TOKENIZER, make_tokenizer

from megarl.config.schema import GenerationHyperparameters, RewardConfig
from megarl.errors import ConfigError
from megarl.rollout import reward_model
from megarl.rollout.api import ModelResponse
from megarl.rollout.reward_model import RewardModel
from megarl.rollout.workflows.reward_fn import RLVRWorkflow, as_reward_fn, make_reward

LONG_S = 120.0
CALL = ("q ", "a", [1, 2], [3])
MESSAGES = [{"role": "user", "content": "q"}]


class Server:
    """Answers request i with `answers[i]`, the last one again and again.

    A number is a reward, another value the body, a tuple (status, text); "drop" ends the
    connection, "hang" answers when the test ends.
    """

    def __init__(self, *answers):
        self.answers, self.bodies, self.headers = list(answers), [], []
        self.running = self.most = 0

    async def answer(self, request):
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            answer = self.answers[min(len(self.bodies), len(self.answers)) - 1]
            await asyncio.sleep(0.01)
            if answer == "hang":
                await self.closing.wait()
            if answer == "drop":
                request.transport.abort()
            if isinstance(answer, tuple):
                headers = {"Location": "/score"} if answer[0] == 302 else {}
                return web.Response(status=answer[0], text=answer[1], headers=headers)
            return web.json_response({"reward": answer} if type(answer) is float else answer)
        finally:
            self.running -= 1

    @contextlib.asynccontextmanager
    async def serving(self):
        self.closing = asyncio.Event()
        app = web.Application()
        app.router.add_post("/score", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        finally:
            self.closing.set()
            await runner.cleanup()


def run(server, *, calls=1, row=None, **config):
    """The rewards of `calls` calls at the same time, and the model, closed."""

    async def main():
        async with server.serving() as url, asyncio.timeout(LONG_S):
            model = make_reward(RewardConfig(url=url, **{"timeout_s": LONG_S, **config}))
            assert isinstance(model, RewardModel)
            try:
                given = {"messages": MESSAGES, "answer": "7"} if row is None else row
                rewards = await asyncio.gather(*(model(*CALL, **given) for _ in range(calls)))
            finally:
                await model.close()
            return rewards, model

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(reward_model, "_FIRST_RETRY_DELAY_S", 0.001)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def chat_ids():
    chat = [*MESSAGES, {"role": "assistant", "content": "a"}]
    return TOKENIZER.encode(TOKENIZER.apply_chat_template(chat, tokenize=False))


CLASSES = {"data": [{"index": 0, "probs": [0.25, -1.5], "label": "x", "num_classes": 2}]}


@pytest.mark.parametrize(
    ("config", "answer", "body", "reward"),
    [
        (
            {},
            {"reward": 0.5},
            {
                "prompt": "q ",
                "completion": "a",
                "prompt_ids": [1, 2],
                "completion_ids": [3],
                "messages": MESSAGES,
                "row": {"answer": "7"},
            },
            0.5,
        ),
        ({"protocol": "vllm_classify"}, CLASSES, {"input": "q a", "use_activation": False}, 0.25),
        (
            {"protocol": "vllm_classify", "label": 1, "model": "rm"},
            CLASSES,
            {"input": "q a", "use_activation": False, "model": "rm"},
            -1.5,
        ),
        (
            {"protocol": "vllm_pooling"},
            {"data": [{"index": 0, "object": "pooling", "data": [0.75]}]},
            {"input": "q a", "use_activation": False, "task": "classify"},
            0.75,
        ),
        (
            {"protocol": "vllm_pooling"},
            {"data": [{"index": 0, "object": "pooling", "data": [[9.0], [0.125]]}]},
            {"input": "q a", "use_activation": False, "task": "classify"},
            0.125,
        ),
        (
            {"protocol": "vllm_score"},
            {"data": [{"index": 0, "object": "score", "score": 2.5}]},
            {"queries": "q ", "documents": "a", "use_activation": False},
            2.5,
        ),
        (
            {"protocol": "sglang_classify"},
            {"embedding": [-3.5], "meta_info": {}},
            {"text": "q a"},
            -3.5,
        ),
    ],
)
def test_protocols(config, answer, body, reward):
    server = Server(answer)
    rewards, model = run(server, **config)
    assert server.bodies == [body]
    assert rewards == [reward]
    assert model.export_stats() == {"reward/failed": 0.0}


@pytest.mark.parametrize(
    ("protocol", "key", "answer"),
    [
        ("vllm_classify", "input", CLASSES),
        ("vllm_pooling", "input", {"data": [{"data": [1.0]}]}),
        ("sglang_classify", "input_ids", {"embedding": [1.0]}),
    ],
)
def test_a_tokenizer_writes_the_chat_of_the_reward_model(protocol, key, answer, tokenizer_path):
    server = Server(answer)
    run(server, protocol=protocol, tokenizer_path=tokenizer_path)
    assert server.bodies[0][key] == chat_ids()
    with pytest.raises(ValueError, match=r"reward\.tokenizer_path: the workflow gives no messages"):
        run(Server(answer), protocol=protocol, tokenizer_path=tokenizer_path, row={})


def test_null_rejects_by_plain_json():
    assert run(Server({"reward": None}))[0] == [None]


@pytest.mark.parametrize(
    ("answers", "rewards", "failures"),
    [
        (["drop", 1.0], [1.0], {"connection": 1}),
        ([(503, "busy"), (429, "busy"), 1.0], [1.0], {"status 503": 1, "status 429": 1}),
        ([(500, "broken")], [0.0], {"status 500": 3}),
        ([(400, "what?"), 1.0], [0.0], {"status 400": 1}),
        ([(302, "elsewhere"), 1.0], [0.0], {"status 302": 1}),
        ([{"score": 1}, 1.0], [0.0], {"answer": 1}),
        ([[1.0], 1.0], [0.0], {"answer": 1}),
        ([(200, "not json"), 1.0], [0.0], {"answer": 1}),
        ([{"reward": "high"}], [0.0], {"error": 3}),
        ([(200, '{"reward": NaN}')], [0.0], {"error": 3}),
    ],
)
def test_failures_are_tried_again_where_that_may_help_and_counted(answers, rewards, failures):
    server = Server(*answers)
    got, model = run(server)
    assert got == rewards
    assert model.failures == failures
    assert len(server.bodies) == sum(failures.values()) + (rewards == [1.0])


def test_a_server_that_is_not_there_or_silent_is_a_counted_failure():
    got, model = run(Server("hang"), timeout_s=0.2, max_attempts=2, on_failure="reject")
    assert got == [None]
    assert model.export_stats() == {
        "reward/failed": 1.0,
        "reward/attempts_failed/timeout": 2.0,
    }

    async def nobody():
        model = RewardModel(RewardConfig(url="http://127.0.0.1:9/x", max_attempts=1))
        try:
            return await model(*CALL), model.failures
        finally:
            await model.close()

    assert asyncio.run(nobody()) == (0.0, {"connection": 1})


def test_so_many_requests_at_one_time():
    server = Server(1.0)
    rewards, _ = run(server, calls=20, max_concurrent=3)
    assert rewards == [1.0] * 20
    assert server.most == 3


def test_the_key_is_sent_and_never_told(monkeypatch, caplog):
    monkeypatch.setenv("RM_KEY", "s3cret")
    server = Server((401, "you sent Bearer s3cret"))
    with caplog.at_level(logging.DEBUG):
        run(server, api_key_env="RM_KEY")
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert "you sent Bearer ***" in caplog.text
    assert "s3cret" not in caplog.text
    monkeypatch.delenv("RM_KEY")
    with pytest.raises(ConfigError, match=r"^reward\.api_key_env: no environment variable RM_KEY"):
        RewardModel(RewardConfig(url="http://h/x", api_key_env="RM_KEY"))


def test_a_tokenizer_that_cannot_write_a_chat_is_named(tmp_path):
    config = {"url": "http://h/x", "protocol": "sglang_classify"}
    with pytest.raises(ConfigError, match=r"^reward\.tokenizer_path: /no/such: "):
        RewardModel(RewardConfig(**config, tokenizer_path="/no/such"))
    make_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^reward\.tokenizer_path: .* has no chat template"):
        RewardModel(RewardConfig(**config, tokenizer_path=str(tmp_path)))


class Engine:
    async def agenerate(self, req):
        answer = TOKENIZER.encode("a")
        count = len(answer)
        return ModelResponse(req.input_ids, answer, [0.0] * count, [0] * count)

    def get_version(self):
        return 0


@pytest.mark.parametrize("row", [{"messages": MESSAGES}, {"prompt": "q"}])
def test_a_workflow_gives_a_reward_model_the_chat(row):
    server = Server(1.0)

    async def main():
        async with server.serving() as url, asyncio.timeout(LONG_S):
            reward = as_reward_fn(RewardConfig(url=url, timeout_s=LONG_S))
            flow = RLVRWorkflow(reward, GenerationHyperparameters(), TOKENIZER)
            return await flow.arun_episode(Engine(), {**row, "answer": "7"})

    assert asyncio.run(main())["rewards"].tolist() == [1.0]
    assert server.bodies[0]["messages"] == MESSAGES
    assert server.bodies[0]["completion"] == "a"
    assert server.bodies[0]["row"] == {"answer": "7"}
    assert json.dumps(server.bodies[0]["prompt_ids"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "h:80/x"}, r"^url: expected http://HOST:PORT/PATH, got 'h:80/x'$"),
        ({"url": "http://h:x/"}, r"^url: expected http://"),
        ({"url": "http://me:s3cret@h/x"}, r"^url: must hold no user and password; see api_key_env"),
        ({"url": "http://h/x", "fn": "m:f"}, r"^url: the reward is either a model's or a function"),
        ({"url": "http://h/x", "options": {"a": 1}}, r"^url: .* with options \{'a': 1\}$"),
        ({"url": "http://h/x", "label": -1}, r"^label: must be >= 0, got -1$"),
        ({"url": "http://h/x", "tokenizer_path": "t"}, r"^tokenizer_path: protocol json sends no"),
        ({"url": "http://h/x", "api_key_env": "sk-s3cret"}, r"^api_key_env: must be the name of"),
        ({"protocol": "vllm_score"}, r"^protocol: 'vllm_score' needs url, which is null$"),
        ({"api_key_env": "KEY"}, r"^api_key_env: 'KEY' needs url"),
        ({"max_concurrent": 0}, r"^max_concurrent: must be > 0, got 0$"),
    ],
)
def test_wrong_configs_are_named(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        RewardConfig(**options)
    assert "s3cret" not in str(caught.value)
