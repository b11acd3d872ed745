"""Ray: the same artifact from any number of workers, also when machines die; clear errors within a stated time."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import warnings
from dataclasses import dataclass

import pytest
import torch

import knowable as kn
from knowable.core.chains import target
from tests.engines.artifacts import artifact_sha

# --- without Ray ------------------------------------------------------------------------------------------------------


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(kn.MissingExtra, match=r"knowable\[dist\]"):
        kn.MAP().fit(*problem(), engine="ray")


def test_an_address_where_nobody_answers_is_refused_within_seconds():
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens
        address = f"127.0.0.1:{free.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(kn.CannotConnect, match="cannot be reached"):
            kn.MAP().fit(*problem(), engine=kn.engines.Ray(address))
    assert time.monotonic() - begun < 30


def test_an_address_where_something_else_answers_is_refused():
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            line, _ = server.accept()
            with line:
                line.recv(100)
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        other = threading.Thread(target=answer)
        other.start()
        with pytest.raises(kn.CannotConnect, match="not as a Ray cluster"):
            kn.MAP().fit(*problem(), engine=kn.engines.Ray(f"127.0.0.1:{server.getsockname()[1]}"))
        other.join()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"address": 3}, "address must be"),
        ({"address": "ray://host:10001"}, "client protocol"),
        ({"num_workers": 0}, "num_workers must be"),
        ({"resources": 2}, "resources must be"),
        ({"resources": {"CPU": -1}}, "resources"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(kn.KnowableError, match=said):
        kn.engines.Ray(**settings)


def test_an_address_without_a_port_is_refused():
    pytest.importorskip("ray")
    with pytest.raises(kn.InvalidArgument, match="host:6379"):
        kn.MAP().fit(*problem(), engine=kn.engines.Ray("nowhere"))


# --- with Ray: a cluster of two nodes on this machine -----------------------------------------------------------------

slow = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.xdist_group("ray")]


def problem(rows: int = 60) -> tuple[kn.Model, tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(rows, 3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return kn.Model(net, kn.Gaussian()), (x, x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(rows, 1))


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        found.add_node(num_cpus=1)
        found.wait_for_nodes()
        yield found
        ray.shutdown()
        found.shutdown()


METHODS = {
    "ensemble in turn": kn.DeepEnsemble(8, epochs=10, vectorise=False),
    "ensemble together": kn.DeepEnsemble(8, epochs=10),
    "ensemble in groups": kn.DeepEnsemble(8, epochs=10),
    "nuts": kn.NUTS(chains=4, draws=10, warmup=10, start="network"),
    "nuts in groups": kn.NUTS(chains=4, draws=10, warmup=10, start="network"),
    "mixture": kn.EnsembleOf(kn.MeanFieldVI(epochs=5), 3),
}


PIECES = {"ensemble in turn": 8, "ensemble in groups": 4, "nuts in groups": 2, "mixture": 3}  # else one


class TestOnACluster:
    pytestmark = slow

    @pytest.mark.parametrize("name", METHODS)
    @pytest.mark.filterwarnings("ignore::knowable.ConvergenceWarning")
    def test_one_and_two_workers_give_the_artifact_of_this_process(self, cluster, name, seed, monkeypatch):
        if "groups" in name:
            monkeypatch.setattr(target, "_GROUP_FLOPS", 2 * 60 * 2 * (3 * 8 + 8))  # of two, on all rows
        model, data = problem()
        here = artifact_sha(METHODS[name].fit(model, data, seed=seed))
        for workers in (1, 2):
            engine = kn.engines.Ray(cluster.address, num_workers=workers)
            assert artifact_sha(METHODS[name].fit(model, data, seed=seed, engine=engine)) == here
            assert engine.counts.lost == 0
            assert engine.counts.done == PIECES.get(name, 1)

    @pytest.mark.filterwarnings("ignore::knowable.ConvergenceWarning")
    def test_a_comparison_has_the_same_records(self, cluster, seed):
        model, data = problem()
        methods = [kn.MAP(epochs=20), kn.DeepEnsemble(3, epochs=5), kn.MeanFieldVI(epochs=5)]
        options = {"methods": methods, "cv": 2, "seed": seed, "samples": 16, "progress": False}
        here = artifact_sha(kn.compare(model, data, **options))
        for workers in (1, 2):
            engine = kn.engines.Ray(cluster.address, num_workers=workers)
            assert artifact_sha(kn.compare(model, data, engine=engine, **options)) == here

    @pytest.mark.parametrize("what", ["ensemble", "nuts", "comparison"])
    @pytest.mark.filterwarnings("ignore::knowable.ConvergenceWarning")
    def test_only_what_a_killed_node_was_doing_is_done_again(self, cluster, what, seed):
        model, data = problem()

        def found(engine):
            if what == "comparison":
                methods = [slow_map(), kn.MAP(epochs=20), slow_map(1)]
                return kn.compare(model, data, methods=methods, cv=2, seed=seed, progress=False, engine=engine)
            method = (
                kn.NUTS(chains=4, draws=10, warmup=10, start="network")
                if what == "nuts"
                else kn.EnsembleOf(slow_map(), 8)
            )
            return method.fit(model, data, seed=seed, engine=engine)

        here = artifact_sha(found(None))
        doomed = cluster.add_node(num_cpus=1, resources={"there": 1})
        cluster.wait_for_nodes()
        only_there = {"there": 0.1} if what == "nuts" else None  # its chains are one piece of work
        engine = kn.engines.Ray(cluster.address, num_workers=3, resources=only_there)
        killer = threading.Thread(target=kill_under_way, args=(cluster, doomed, engine, only_there is not None))
        killer.start()
        with pytest.warns(kn.KnowableWarning, match="lost with their workers"):
            there = artifact_sha(found(engine))
        killer.join()
        assert there == here
        counts = engine.counts
        assert counts.lost == 1 and counts.done == {"ensemble": 8, "nuts": 1, "comparison": 6}[what]
        assert counts.started == counts.done + 1

    def test_a_worker_that_dies_again_and_again_is_an_error(self, cluster):
        model, data = problem()
        begun = time.monotonic()
        with pytest.raises(kn.WorkerLost, match="begun 3 times"):
            Deadly().fit(model, data, engine=kn.engines.Ray(cluster.address))
        assert time.monotonic() - begun < 300

    def test_work_that_no_machine_has_room_for_is_refused(self, cluster):
        engine = kn.engines.Ray(cluster.address, resources={"CPU": 64})
        with pytest.raises(kn.CannotConnect, match="has room for a piece of work"):
            kn.MAP(epochs=1).fit(*problem(), engine=engine)

    def test_an_error_in_the_work_is_raised_as_it_is(self, cluster):
        model, (x, y) = problem()
        method = kn.MAP(epochs=5, learning_rate=1e30, training=kn.Training(on_divergence="raise"))
        with pytest.raises(kn.Diverged):
            method.fit(model, (x, y), engine=kn.engines.Ray(cluster.address))

    def test_ctrl_c_stops_the_workers_and_nothing_is_left_behind(self, cluster, tmp_path):
        import ray

        model, data = problem()
        engine = kn.engines.Ray(cluster.address, num_workers=2)
        kn.MAP(epochs=1).fit(model, data, engine=engine)  # workers have begun
        threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            kn.EnsembleOf(slow_map(seconds=60), 2).fit(model, data, engine=engine)
        assert time.monotonic() - begun < 40
        until = time.monotonic() + 30
        while ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]:  # all is free again
            assert time.monotonic() < until
            time.sleep(0.2)


def kill_under_way(cluster, doomed, engine, alone: bool) -> None:
    """Kill a node while it works: as soon as some pieces are done, or once the only one has been under way."""
    while engine.counts.started == 0 or (engine.counts.done < 2 and not alone):
        time.sleep(0.05)
    time.sleep(1.0)
    if alone:
        cluster.add_node(num_cpus=1, resources={"there": 1})  # where it can go on
    cluster.remove_node(doomed, allow_graceful=False)


def slow_map(number: int = 0, seconds: float = 3.0) -> kn.MAP:
    return SlowMAP(epochs=20 + number, seconds=seconds)


@dataclass(frozen=True, repr=False, kw_only=True)
class SlowMAP(kn.MAP):
    """A fit that takes a while."""

    seconds: float = 3.0

    def _fit(self, job):
        time.sleep(self.seconds)
        return super()._fit(job)


@dataclass(frozen=True, repr=False, kw_only=True)
class Deadly(kn.MAP):
    """A fit that takes its process with it, as the kernel does where memory is out."""

    def _fit(self, job):
        os.kill(os.getpid(), signal.SIGKILL)
        return super()._fit(job)
