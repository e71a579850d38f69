"""Health, readiness and metrics of a worker over HTTP."""

import asyncio
import urllib.error
import urllib.request

import pytest

from helpers.local_worker import (
    LocalWorker,
    RouterSession,
    local_worker,
    make_submit,
)
from helpers.worker_service import PROMPT
from kvasir.proto.process import join_host_port
from kvasir.worker.health import LOOP_PATIENCE, STEP_PATIENCE, Health, HealthServer

# --- health and metrics ----------------------------------------------------------------------


def get(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_either_address_family_is_served(host: str) -> None:
    server = HealthServer(host, 0, Health())
    try:
        url = f"http://{join_host_port(host, server.port)}/health"
        status = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).status)
        assert status == 200
    finally:
        await asyncio.to_thread(server.stop)
    async with local_worker(host=host) as worker:
        assert worker.server.port


def test_only_what_hangs_is_not_alive() -> None:
    now = step = 0.0
    health = Health(clock=lambda: now)
    health.step_seconds = lambda: step
    alive = [health.alive]
    now, step = LOOP_PATIENCE, STEP_PATIENCE
    alive.append(health.alive)
    now = LOOP_PATIENCE + 1
    alive.append(health.alive)
    health.beat()
    alive.append(health.alive)
    step = STEP_PATIENCE + 1
    alive.append(health.alive)
    assert alive == [True, True, False, True, False]


async def test_the_http_server(worker: LocalWorker, session: RouterSession) -> None:
    await session.send(submit=make_submit("r", PROMPT))
    await session.finished("r")
    now = 0.0
    health = Health(clock=lambda: now)
    server = HealthServer("127.0.0.1", 0, health)
    try:
        assert await asyncio.to_thread(get, server.port, "/health") == (200, b"")
        assert await asyncio.to_thread(get, server.port, "/ready") == (503, b"")
        health.ready = True
        assert await asyncio.to_thread(get, server.port, "/ready") == (200, b"")
        assert (await asyncio.to_thread(get, server.port, "/other"))[0] == 404
        server.publish(worker.server.metrics.registry)
        status, body = await asyncio.to_thread(get, server.port, "/metrics")
        assert status == 200
        now = 31.0
        assert await asyncio.to_thread(get, server.port, "/health") == (503, b"")
        assert await asyncio.to_thread(get, server.port, "/ready") == (503, b"")
    finally:
        await asyncio.to_thread(server.stop)
    text = body.decode()
    for line in (
        'vllm:num_requests_running{model_name="smollm2"} 0.0',
        'vllm:num_requests_waiting{model_name="smollm2"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="smollm2"} 0.0',
        'kvasir_worker_kv_slots{model_name="smollm2",state="internal_waste"} 0.0',
        'kvasir_worker_kv_waste_ratio{model_name="smollm2"} 0.0',
        'kvasir_worker_kv_block_table_entries{model_name="smollm2"} 0.0',
        'vllm:prefix_cache_queries_total{model_name="smollm2"} 50.0',
        'vllm:prefix_cache_hits_total{model_name="smollm2"} 0.0',
        'vllm:num_preemptions_total{model_name="smollm2"} 0.0',
        'vllm:time_to_first_token_seconds_count{model_name="smollm2"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="smollm2"} 7.0',
        'kvasir_worker_prefill_tokens_total{model_name="smollm2"} 50.0',
        'kvasir_kv_transfer_total{outcome="ok"} 0.0',
        'kvasir_kv_transfer_bytes_total{direction="sent"} 0.0',
        "kvasir_kv_transfer_seconds_count 0.0",
        "kvasir_kv_transfer_queue_seconds_count 0.0",
        "kvasir_kv_transfer_compute_seconds_count 0.0",
    ):
        assert f"\n{line}\n" in text
    assert 'vllm:cache_config_info{block_size="4",' in text
