"""On a real cluster on this machine: two replicas of which one is killed, and a dataset whose run is killed and resumed.

Ray is no part of the development environment: `make replicas` installs it and runs this; PROVE=1 takes 200 requests and 1,000 prompts.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import toys

from echelon import LLM, ConfigError, SamplingParams
from echelon.demo import TARGET
from echelon.sampling import seed_of

if not toys.PROVE and importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed; run: make replicas", allow_module_level=True)

import grpc  # with Ray

from echelon.ray import build_app, cluster
from echelon.ray.parts import PATTERN

NUM_REQUESTS, AT_ONCE = (200, 24) if toys.PROVE else (32, 12)
NUM_PROMPTS, PART, NUM_KILLS = (1000, 32, 2) if toys.PROVE else (60, 10, 1)
ENGINE: dict[str, Any] = {"max_num_seqs": 16, "dtype": "float32"}
DEADLINE = 240.0  # seconds that a cluster may take to start, or to end


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found


def named(process: psutil.Process, part: str) -> list[psutil.Process]:
    """Processes below one whose titles hold `part`."""
    found = []
    for child in process.children(recursive=True):
        try:
            if part in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            pass
    return found


class Served:
    """`echelon serve --replicas 2`, in a process of its own."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        flags = ["--replicas", "2", "--port", str(port), "--dtype", "float32", "--max-num-seqs", "16"]
        command = [sys.executable, "-m", "echelon", "serve", str(TARGET), *flags, "--speculative-config.method", "ngram"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url, self.log = f"http://127.0.0.1:{port}", list[str]()
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()))
        self._reader.start()
        until(lambda: self.process.poll() is not None or any("2 replicas" in line for line in self.log), "it does not start")
        assert self.process.poll() is None, self.log

    def end(self) -> None:
        """After a signal: every process of it has ended, and the status is 0."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(DEADLINE) == 0, self.log
        assert not psutil.wait_procs(children, DEADLINE)[1]
        self._reader.join()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.end()


def asked(i: int) -> dict[str, Any]:
    temperature = 0.8 if i % 2 else 0.0
    return {"prompt": f"def f{i}(x):\n", "max_tokens": 24 + i % 16, "temperature": temperature, "stream": i % 3 == 0}


async def text_of(client: httpx.AsyncClient, i: int) -> str:
    """The text of a request, streamed or whole; fails where it is no answer."""
    async with client.stream("POST", "/v1/completions", json=asked(i), headers={"X-Request-ID": f"r{i}"}) as response:
        body = (await response.aread()).decode()
        assert response.status_code == 200, body
    if not asked(i)["stream"]:
        return str(json.loads(body)["choices"][0]["text"])
    events = [json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line.startswith("data: {")]
    assert body.endswith("data: [DONE]\n\n") and not any("error" in e for e in events), body
    return "".join(choice["text"] for e in events for choice in e["choices"])


async def texts_of(url: str, after: dict[int, Callable[[], None]]) -> list[str]:
    """Texts of all requests; `after[n]` is called when n are answered."""
    slots, count = asyncio.Semaphore(AT_ONCE), 0

    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE, limits=httpx.Limits(max_connections=None)) as client:

        async def one(i: int) -> str:
            nonlocal count
            async with slots:
                text = await text_of(client, i)
            count += 1
            after.get(count, lambda: None)()
            return text

        return await asyncio.gather(*(one(i) for i in range(NUM_REQUESTS)))


def test_all_that_listens_is_on_loopback(served: Served) -> None:
    process = psutil.Process(served.process.pid)
    listening = [
        (ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:")), connection.laddr.port, each.name())
        for each in (process, *process.children(recursive=True))
        for connection in each.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 5
    assert [(str(ip), port, name) for ip, port, name in listening if not ip.is_loopback] == []


def test_nobody_joins_without_the_token(served: Served) -> None:
    head = next(iter(named(psutil.Process(served.process.pid), "gcs_server")))
    codes = set()
    for port in (c.laddr.port for c in head.net_connections("inet") if c.status == psutil.CONN_LISTEN):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo", lambda b: b, lambda b: b)(b"", timeout=60.0)
        codes.add(refused.value.code())
    assert grpc.StatusCode.UNAUTHENTICATED in codes


def test_the_routes_are_those_of_the_server(served: Served) -> None:
    with httpx.Client(base_url=served.url, timeout=60.0) as client:
        assert client.get("/readyz").status_code == client.get("/livez").status_code == client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "target"
        running = re.findall(r'^echelon:num_requests_running{.*replica="(\w+)"', client.get("/metrics").text, re.MULTILINE)
        assert len(set(running)) == 2
        wrong = client.post("/v1/completions", json={"prompt": "a", "colour": 1})
        assert wrong.status_code == 400 and "colour" in wrong.json()["error"]["message"]
        assert client.get("/v1/models", headers={"Host": "elsewhere"}).status_code == 403
        assert client.get("/version", headers={"X-Request-ID": "abc"}).headers.get_list("x-request-id") == ["abc"]


def test_turns_of_a_conversation_find_their_prefix(served: Served) -> None:
    with httpx.Client(base_url=served.url, timeout=60.0) as client:
        for i in range(6):  # by chance alone all six would meet their replica once in 64 times
            prompt = f"class Stack{i}:\n" + "    def push(self, item):\n        self.items.append(item)\n\n" * 6
            for more, is_known in (("", False), ("    def pop(self):\n", True)):
                answer = client.post("/v1/completions", json={"prompt": prompt + more, "max_tokens": 4, "temperature": 0}).json()
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached > len(prompt) // 10) == is_known, (i, answer["usage"])


def test_a_replica_that_is_killed_is_noticed_by_nobody(served: Served) -> None:
    process = psutil.Process(served.process.pid)

    def kill() -> None:
        victim, *others = named(process, "echelon:Replica")
        assert len(others) == 1
        victim.kill()

    texts = asyncio.run(texts_of(served.url, {NUM_REQUESTS // 4: kill}))
    with LLM(str(TARGET), **ENGINE) as llm:
        rows = [asked(i) for i in range(NUM_REQUESTS)]
        noise = [{"temperature": row["temperature"], "seed": seed_of(f"r{i}")} for i, row in enumerate(rows)]
        params = [SamplingParams(max_tokens=row["max_tokens"], **more) for row, more in zip(rows, noise, strict=True)]
        assert [out.outputs[0].text for out in llm.generate([row["prompt"] for row in rows], params)] == texts
    until(lambda: len(named(process, "echelon:Replica")) == 2, "no replica takes the place of the one that was killed")


DRIVER = """
import sys
import ray
from echelon.demo import TARGET
from echelon.errors import RequestError
from echelon.ray import connect, generate
output, count, part = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
connect(num_cpus=2)
rows = [{"id": f"q{i}", "prompt": f"def f{i}(x):\\n", "params": {"max_tokens": 8 + i % 8}} for i in range(count)]
rows[3] = {"id": "q3", "prompt": "word " * 100_000, "params": None}
engine = {"max_num_seqs": 16, "dtype": "float32"}
for wrong in ([{"prompt": "a"}], [{"id": None, "prompt": "a"}], [{"id": 1, "prompt": "a"}] * 2):
    try:
        generate(ray.data.from_items(wrong), TARGET, output + "-wrong")
    except RequestError:
        continue
    raise SystemExit("rows without an id of their own were taken")
found = generate(ray.data.from_items(rows), TARGET, output, {"temperature": 0.8}, num_engines=2, batch_size=part, **engine)
print(found.count())
"""


def test_a_dataset_whose_run_is_killed_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "out"), str(NUM_PROMPTS), str(PART)]

    def num_parts() -> int:
        return len(list((tmp_path / "out").glob(PATTERN)))

    for _ in range(NUM_KILLS):
        before = num_parts()
        with subprocess.Popen(command) as driver:
            until(lambda most=before + 1: num_parts() > most or driver.poll() is not None, "no part is written")
            assert driver.poll() is None, "it has ended before it was killed"
            children = psutil.Process(driver.pid).children(recursive=True)
            driver.kill()
        assert not psutil.wait_procs(children, DEADLINE)[1], "processes outlive the one that started them"
        assert before < num_parts() < NUM_PROMPTS // PART
    done = subprocess.run(command, check=True, timeout=2 * DEADLINE, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split()[-1] == str(NUM_PROMPTS)
    rows = [json.loads(line) for part in (tmp_path / "out").glob(PATTERN) for line in part.read_text("utf-8").splitlines()]
    assert sorted(row["id"] for row in rows) == sorted(f"q{i}" for i in range(NUM_PROMPTS))
    assert [row["id"] for row in rows if "error" in row] == ["q3"]
    with LLM(str(TARGET), **ENGINE) as llm:
        served = [i for i in range(NUM_PROMPTS) if i != 3]
        params = [SamplingParams(temperature=0.8, max_tokens=8 + i % 8, seed=seed_of(f"q{i}")) for i in served]
        texts = [out.outputs[0].text for out in llm.generate([f"def f{i}(x):\n" for i in served], params)]
    assert {row["id"]: row["text"] for row in rows if "text" in row} == {f"q{i}": text for i, text in zip(served, texts, strict=True)}


@pytest.mark.parametrize("address", ["10.0.0.5", "10.0.0.5:x", "ray://10.0.0.5:10001", "auto", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        cluster.connect(address)


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match="no Ray cluster answers"):
        cluster.connect(f"127.0.0.1:{port}")


def test_a_cluster_off_loopback_is_not_joined_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(cluster, "_check_reached", lambda *_: None)
    with pytest.raises(ConfigError, match="no token is set here"):
        cluster.connect("192.0.2.1:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="unset it"):
        cluster.connect()


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_cluster_that_asks_nobody_for_a_token_is_not_joined(monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    class Head(grpc.GenericRpcHandler):
        def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
                if is_closed:
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    joined = []
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(cluster, "_is_loopback", lambda _host: False)
    monkeypatch.setattr(cluster.ray, "init", lambda **given: joined.append(given["address"]))
    server = grpc.server(futures.ThreadPoolExecutor(1), [Head()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        if is_closed:
            cluster.connect(address)
        else:
            with pytest.raises(ConfigError, match="asks for no token"):
                cluster.connect(address)
    finally:
        server.stop(None)
    assert joined == [address] * is_closed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_replicas": 0}, "give 1 or more"),
        ({"num_replicas": "2"}, "int"),
        ({"autoscaling_config": {"max_replicas": 0}}, "autoscaling_config"),
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}, "autoscaling_config"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"server": {"host": "0.0.0.0"}}, "can be reached from elsewhere"),
    ],
)
def test_mistakes_in_an_application_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_app(TARGET, **given)


def test_autoscaling_is_passed_on() -> None:
    app = build_app(TARGET, num_replicas=2, autoscaling_config={"max_replicas": 20, "upscale_delay_s": 7}, max_num_seqs=8)
    replicas = app._bound_deployment.init_args[0]._bound_deployment
    config = replicas._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.upscale_delay_s, config.target_ongoing_requests) == (2, 20, 7, 8)
    assert app._bound_deployment.num_replicas == 3, "gateways grow with the replicas"
