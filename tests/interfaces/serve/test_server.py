"""The command as a process: signals, dead workers, endless requests, the token, models that cannot be loaded."""

import json
import os
import signal
import socket
import threading
import time

import httpx
import pytest

from tests.interfaces.serve.process import Process

ROWS = {"rows": [{"dose": 3.0, "site": "north", "day": "2021-05-05", "treated": "yes"}]}
TOKEN = "a-token-that-nobody-guesses-0123456789"


def test_a_life_with_a_token_a_lost_worker_and_an_orderly_end(saved, tmp_path):
    """One process for several promises, because starting one takes seconds."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    with Process(saved / "numbers", "--token-file", tmp_path / "token", "--max-rows", 50) as service:
        client = httpx.Client(base_url=service.address, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60)
        assert httpx.get(f"{service.address}/health").status_code == 200
        assert httpx.post(f"{service.address}/predict", json=ROWS).status_code == 401
        first = client.post("/predict", json=ROWS, headers={"x-request-id": "mine-1"})
        assert first.status_code == 200 and first.json()["request_id"] == "mine-1"
        assert client.post("/predict", json={"rows": ROWS["rows"] * 51}).status_code == 413

        os.kill(service.workers[0], signal.SIGKILL)
        service.until("worker died")
        states = {client.get("/ready").status_code}
        service.until("worker ready")
        end = time.monotonic() + 60
        while client.get("/ready").status_code != 200:
            assert time.monotonic() < end
        assert states == {503}
        again = client.post("/predict", json=ROWS)
        assert again.json()["predictions"] == first.json()["predictions"]

        with socket.create_connection(service.address.removeprefix("http://").split(":")) as endless:
            endless.settimeout(30)
            with pytest.raises(OSError):  # noqa: PT012
                endless.sendall(b"GET /health HTTP/1.1\r\nx: ")
                while True:
                    endless.sendall(b"y" * 4096)

        service.process.send_signal(signal.SIGTERM)
        service.until("stopping")
        last = client.post("/predict", json=ROWS)  # in the moment in which clients hear that it ends
        assert last.status_code == 200 and last.headers["connection"] == "close"
        assert service.end() == 0
        requests = [json.loads(line) for line in service.lines if '"request"' in line]
        assert any(each["request_id"] == "mine-1" and each["rows"] == 1 for each in requests)
        assert TOKEN not in service.text and "Traceback" not in service.text


@pytest.mark.slow
def test_what_cannot_be_served_ends_with_a_message(saved, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "estimator.json").write_text('{"estimator": "os.system"}')
    process = Process(broken)
    assert process.end() == 2
    assert "estimator.json cannot be read" in process.text and "Traceback" not in process.text


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["SIGTERM to the service", "SIGKILL to a worker"])
def test_under_load_no_request_that_was_accepted_is_lost(saved, loss):
    with Process(saved / "numbers", "--workers", "2") as service:
        found, stop = [], threading.Event()

        def client(number):
            """Ask until the service says that it closes; any other failure is an answer that was lost."""
            with httpx.Client(base_url=service.address, timeout=60) as http:
                k = 0
                while not stop.is_set():
                    k += 1
                    row = {**ROWS["rows"][0], "dose": (number + 0.01 * k) % 10}
                    try:
                        answer = http.post("/predict", json={"rows": [row]})
                    except httpx.ConnectError:  # it was not accepted
                        return
                    except httpx.HTTPError as error:
                        found.append(repr(error))
                        return
                    found.append(answer.status_code)
                    if answer.headers.get("connection") == "close":
                        return

        threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        while len(found) < 200:
            time.sleep(0.05)
        if loss.startswith("SIGTERM"):
            service.process.terminate()
        else:
            for pid in service.workers:
                os.kill(pid, signal.SIGKILL)
                time.sleep(1)
            while httpx.get(f"{service.address}/ready", timeout=30).json()["restarts"] < 2:
                time.sleep(0.2)
            stop.set()
        for thread in threads:
            thread.join(60)
        assert set(found) == {200}
        if loss.startswith("SIGTERM"):
            assert service.end() == 0
