"""The Ray engine: the same records as here, from a real local cluster; and a clear word where Ray is absent."""

import builtins

import pytest

from attn_zoo.errors import UnsupportedError
from attn_zoo.matrix.drive.engines.ray import RayEngine
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.store.store import Store
from tests.matrix.conftest import tiny_plan


def test_without_ray_the_message_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def without_ray(name, *arguments, **keywords):
        if name == "ray":
            raise ModuleNotFoundError(name, name=name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(UnsupportedError, match=r"pip install 'attn-zoo\[ray\]'"):
        RayEngine()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # from Ray's own threads and sockets at shutdown
def test_records_from_a_local_cluster_are_those_of_the_local_engine(tmp_path):
    pytest.importorskip("ray", reason="the ray engine is optional: pip install 'attn-zoo[ray]'")
    plan = tiny_plan(["fake_segfault", "fake_bug"], seq_len=[16, 1024], isolation="lane")
    outcomes = []
    for name, engine in (("local", None), ("ray", RayEngine(num_cpus=2))):
        store = Store(tmp_path / name)
        summary = run(plan, store, engine=engine)
        assert summary.left == ()
        records = store.records()
        outcomes.append({(item.cell.key, item.status, item.reason, item.exit_code) for item in records})
        assert {item.environment for item in records} <= set(store.info().environments)
        assert all(store.log(item.cell.key).is_file() for item in records)
    assert outcomes[0] == outcomes[1]
    assert sorted(status for _, status, _, _ in outcomes[0]) == ["crashed", "error", "ok", "ok"]
