"""The service over ASGI: answers, errors that name the field, the token, and what comes of hostile rows."""

import asyncio
import base64
import json
import math

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from knowable.interfaces.serve.rows import ARROW, Limits
from tests.interfaces.serve.conftest import arrow_of
from tests.interfaces.serve.in_process import Service

ROW = {"dose": 3.0, "site": "north", "day": "2021-05-05", "treated": "yes"}


def ask(served, *requests, **settings):
    """Answers to ``(method, path, options)``, one after the other."""

    async def run():
        async with Service(served, **settings) as service:
            transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                return [await client.request(method, path, **options) for method, path, options in requests]

    return asyncio.run(run())


def predict(served, *bodies, path="/predict", **settings):
    """Answers to bodies of JSON."""
    return ask(served, *(("POST", path, {"json": body}) for body in bodies), **settings)


def test_numbers_are_those_of_the_estimator(saved, numbers):
    import knowable as kn

    (found,) = predict(numbers, {"rows": [ROW, {**ROW, "dose": 9.0}], "level": 0.8, "epsilon": 0})
    assert found.status_code == 200, found.text
    rows = found.json()["predictions"]
    frame = {name: [ROW[name], ROW[name]] for name in ROW} | {"dose": [3.0, 9.0]}
    expected = kn.BayesianRegressor.load(saved / "numbers").predict_dist(frame)
    low, high = expected.interval(0.8)
    for name, values in (("mean", expected.mean), ("std", expected.std), ("low", low), ("high", high)):
        assert [row[name] for row in rows] == pytest.approx(values.flatten().tolist(), rel=1e-6)
    assert [row["draws"] for row in rows] == [64, 64] and rows[0]["notes"] == []
    parts = [row["aleatoric_std"] ** 2 + row["epistemic_std"] ** 2 for row in rows]
    assert parts == pytest.approx([row["std"] ** 2 for row in rows], rel=1e-6)


def test_classes_come_with_what_the_certificate_promises(saved, classes):
    import knowable as kn

    rows = [{"x": 0.1 * k - 1, "z": 0.5} for k in range(20)]
    (found,) = predict(classes, {"rows": rows})
    certificate = kn.load(saved / "classes" / "certificate", classes._posterior.model.net)
    x = torch.from_numpy(classes._schema.encode(kn.tabular.read_table({n: [r[n] for r in rows] for n in ("x", "z")})))
    expected = certificate.predict(x)
    for place, row in enumerate(found.json()["predictions"]):
        assert sum(row["probabilities"].values()) == pytest.approx(1.0)
        assert row["label"] == max(row["probabilities"], key=row["probabilities"].get)
        inside = [name for name, there in zip(("above", "below"), expected.set[place], strict=True) if there]
        assert row["set"] == inside and row["abstain"] == (not expected.accept[place])
        assert row["p_value"] == pytest.approx(expected.p_value[place].item())
    bound = next(each.bound for each in certificate.guarantees if each.name == "rejection")
    assert found.json().get("abstain_bound") == bound


def test_csv_arrow_and_json_are_answered_alike(numbers):
    csv = "dose,site,day,treated\n3.0,north,2021-05-05,yes\n"
    typed = {name: [value] for name, value in ROW.items()}
    found = ask(
        numbers,
        ("POST", "/predict", {"json": {"rows": [ROW]}}),
        ("POST", "/predict", {"content": csv, "headers": {"content-type": "text/csv; charset=utf-8"}}),
        ("POST", "/predict", {"content": arrow_of(typed), "headers": {"content-type": ARROW}}),
    )
    assert [each.status_code for each in found] == [200, 200, 200], [each.text for each in found]
    first, *others = [each.json()["predictions"][0] for each in found]
    assert all(other[name] == pytest.approx(first[name]) for other in others for name in ("mean", "low", "high"))


def test_compressed_arrow_is_refused_before_it_is_opened(numbers):
    typed = {name: [value] * 100 for name, value in ROW.items()}
    body = arrow_of(typed, compression="zstd")
    (found,) = ask(numbers, ("POST", "/predict", {"content": body, "headers": {"content-type": ARROW}}))
    assert found.status_code == 400 and "compressed" in found.json()["error"]


def test_rows_of_tensors(saved, tensors):
    import knowable as kn

    x = [[0.1, 0.2, 0.3], [1, 2, 3]]
    (found,) = predict(tensors, {"rows": x, "epsilon": 0})
    expected = kn.load(saved / "tensors").predict(torch.tensor(x))
    assert [row["mean"] for row in found.json()["predictions"]] == pytest.approx(expected.mean.tolist(), rel=1e-5)
    wrong = predict(tensors, {"rows": [[1, 2]]}, {"rows": [[1, 2, 3], [1, 2]]}, {"rows": [[1, 2, "3"]]}, {"rows": [[]]})
    assert [each.status_code for each in wrong] == [422] * 4
    assert [each.json()["row"] for each in wrong] == [0, 1, 0, 0]


def test_a_new_category_a_gap_and_a_far_value_are_remarked_and_widen(numbers):
    (found,) = predict(numbers, {"rows": [ROW, {**ROW, "site": "moon"}, {**ROW, "dose": None}, {**ROW, "dose": 99}]})
    known, new, gap, far = found.json()["predictions"]
    assert known["notes"] == [] and new["std"] > known["std"] and far["std"] > known["std"]
    for row, word in ((new, "'moon'"), (gap, "missing"), (far, "outside")):
        assert word in row["notes"][0]


def test_the_same_row_gets_the_same_answer_in_any_company(numbers, classes):
    async def run(served, rows):
        async with Service(served, together=1024) as service:
            transport = httpx.ASGITransport(service.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                alone = [(await client.post("/predict", json={"rows": [row]})).json() for row in rows]
                crowd = await asyncio.gather(*(client.post("/predict", json={"rows": [row]}) for row in rows))
        return alone, [each.json() for each in crowd], service.made[0].calls

    rows = [{**ROW, "dose": 0.2 * k, "site": ("north", "south", "moon")[k % 3]} for k in range(30)]
    for served, these in ((numbers, rows), (classes, [{"x": 0.1 * k, "z": -0.1 * k} for k in range(30)])):
        alone, crowd, calls = asyncio.run(run(served, these))
        assert max(calls) > 10  # they did go together
        for one, other in zip(alone, crowd, strict=True):
            assert one["predictions"] == other["predictions"]


def test_one_bad_request_does_not_spoil_the_others(numbers):
    async def run():
        async with Service(numbers) as service:
            transport = httpx.ASGITransport(service.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                bodies = [{"rows": [{**ROW, "day": "no date" if k == 3 else "2021-01-01"}]} for k in range(8)]
                return await asyncio.gather(*(client.post("/predict", json=body) for body in bodies))

    found = asyncio.run(run())
    assert [each.status_code for each in found] == [200] * 3 + [422] + [200] * 4
    assert found[3].json()["field"] == "day" and "'no date'" in found[3].json()["error"]


WRONG = [
    ({"rows": [{key: ROW[key] for key in ROW if key != "dose"}]}, 422, "dose"),
    ({"rows": [{**ROW, "colour": "red"}]}, 422, "colour"),
    ({"rows": [{**ROW, "dose": "three"}]}, 422, "dose"),
    ({"rows": [{**ROW, "dose": True}]}, 422, "dose"),
    ({"rows": [{**ROW, "dose": [1]}]}, 422, "dose"),
    ({"rows": [{**ROW, "site": {"a": 1}}]}, 422, "site"),
    ({"rows": [{**ROW, "site": "x" * 20_000}]}, 422, "site"),
    ({"rows": [{**ROW, "dose": 1e308}]}, 422, "dose"),
    ({"rows": [{**ROW, "dose": 10**400}]}, 422, "dose"),
    ({"rows": [{**ROW, "day": "2021-13-45"}]}, 422, "day"),
    ({"rows": [{**ROW, "day": 20210505}]}, 422, "day"),
    ({"rows": [{**ROW, "treated": "perhaps"}]}, 422, "treated"),
    ({"rows": [ROW, 3]}, 422, "rows"),
    ({"rows": []}, 422, "rows"),
    ({"rows": {"dose": [1]}}, 422, "rows"),
    ({}, 422, "rows"),
    ([ROW], 422, "rows"),
    ({"rows": [ROW], "level": 1}, 422, "level"),
    ({"rows": [ROW], "level": "0.9"}, 422, "level"),
    ({"rows": [ROW], "epsilon": -1}, 422, "epsilon"),
    ({"rows": [ROW], "draws": 65}, 422, "draws"),
    ({"rows": [ROW], "draws": 2.5}, 422, "draws"),
    ({"rows": [ROW], "fast": True}, 422, "fast"),
    ({"rows": [ROW], "seed": 3}, 422, "seed"),
]


def test_what_is_wrong_is_refused_by_name(numbers):
    found = predict(numbers, *(body for body, _, _ in WRONG))
    for answer, (body, status, field) in zip(found, WRONG, strict=True):
        assert (answer.status_code, answer.json()["field"]) == (status, field), (body, answer.text)
        assert "Traceback" not in answer.text and answer.json()["error"].endswith(".")
        assert answer.headers["x-request-id"] == answer.json()["request_id"]


@pytest.mark.parametrize(
    ("body", "media", "status"),
    [
        (b'{"rows": [{"dose": NaN}]}', "application/json", 422),
        (b'{"rows": [', "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"rows": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b"", "application/json", 400),
        (b"", "text/csv", 422),
        (b"dose,site\n1,2,3\n", "text/csv", 422),
        (b"dose,site,day,treated\nx,north,2021-01-01,yes\n", "text/csv", 422),
        (b"dose,site,day,treated,extra\n1,north,2021-01-01,yes,1\n", "text/csv", 422),
        (b"ARROW1\0\0" + b"\xff" * 64, ARROW, 400),
        (b"\xff\xff\xff\xff\x10\0\0\0" + b"\xff" * 64, ARROW, 400),
        (b"", ARROW, 400),
        (b"<rows/>", "application/xml", 415),
        (b"x", "", 415),
    ],
)
def test_bodies_that_cannot_be_read(numbers, body, media, status):
    (found,) = ask(numbers, ("POST", "/predict", {"content": body, "headers": {"content-type": media}}))
    assert found.status_code == status, found.text


def test_limits_of_rows_and_bodies(numbers):
    async def many():
        for _ in range(100):
            yield b" " * 1000

    limits = Limits(rows=3, body=2000)
    found = ask(
        numbers,
        ("POST", "/predict", {"json": {"rows": [ROW] * 4}}),
        ("POST", "/predict", {"content": b" " * 3000, "headers": {"content-type": "application/json"}}),
        ("POST", "/predict", {"content": many(), "headers": {"content-type": "application/json"}}),
        ("POST", "/predict", {"json": {"rows": [ROW] * 3}}),
        limits=limits,
    )
    assert [each.status_code for each in found] == [413, 413, 413, 200]


def test_without_a_token_only_health_answers(numbers):
    token = "0123456789abcdef-secret"
    paths = [("GET", path) for path in ("/", "/ready", "/metrics", "/model", "/alarm", "/openapi.json", "/nothing")]
    paths += [("POST", "/predict"), ("POST", "/explain"), ("PUT", "/predict")]
    basic = base64.b64encode(f"anyone:{token}".encode()).decode()
    wrong = [
        "Bearer wrong",
        f"Bearer {token}x",
        f"Bearer {token[:-1]}",
        "Basic !!!",
        "Bearer",
        token,
        f"Digest {token}",
    ]
    found = ask(
        numbers,
        *((method, path, {}) for method, path in paths),
        *(("GET", "/ready", {"headers": {"authorization": each}}) for each in wrong),
        ("GET", "/health", {}),
        ("GET", "/ready", {"headers": {"authorization": f"Bearer {token}"}}),
        ("GET", "/", {"headers": {"authorization": f"Basic {basic}"}}),
        token=token,
    )
    assert [each.status_code for each in found] == [401] * (len(paths) + len(wrong)) + [200] * 3
    assert "Bearer" in found[0].headers["www-authenticate"]


def test_explanations_name_noise_few_rows_and_the_column_outside(numbers, classes):
    (found,) = predict(numbers, {"rows": [ROW, {**ROW, "dose": 60.0}]}, path="/explain")
    inside, outside = found.json()["predictions"]
    assert outside["few_similar_rows_share"] > inside["few_similar_rows_share"]
    assert any("dose is 60, outside the training rows" in each for each in outside["reasons"])
    assert any("usual value of dose" in each for each in outside["reasons"])
    (found,) = predict(classes, {"rows": [{"x": 0.0, "z": 0.0}]}, path="/explain")
    assert any("Noise" in each for each in found.json()["predictions"][0]["reasons"])
    (many,) = predict(numbers, {"rows": [ROW] * 101}, path="/explain")
    assert many.status_code == 413


def test_what_the_service_says_of_itself(numbers, classes):
    found = ask(
        numbers,
        *(("GET", path, {}) for path in ("/health", "/ready", "/model", "/metrics", "/", "/openapi.json", "/alarm")),
        ("GET", "/nothing", {}),
        ("GET", "/predict", {}),
    )
    assert [each.status_code for each in found] == [200] * 6 + [404, 404, 405]
    assert {column["name"] for column in found[2].json()["columns"]} == set(ROW)
    assert (
        "knowable_requests_total" in found[3].text
        and "default-src 'none'" in found[4].headers["content-security-policy"]
    )
    assert "/*MODEL*/" not in found[4].text and "http" not in found[4].text.replace("http://www.w3.org/2000/svg", "")
    (alarm,) = ask(classes, ("GET", "/alarm", {}))
    assert alarm.json()["alarm"] is False


def test_hostile_names_cannot_leave_the_page(saved, tmp_path):
    import knowable as kn
    from knowable.interfaces.serve.served import Served, Source

    name = "</script><script>alert(1)</script>"
    x = np.linspace(-1, 1, 30)
    estimator = kn.BayesianRegressor(kn.MAP(epochs=5), random_state=0)
    estimator.fit({name: x, "other": x**2}, 3 * x).save(tmp_path / "run")
    (found,) = ask(Served.load(Source(tmp_path / "run")), ("GET", "/", {}))
    assert found.text.count("</script>") == 1


VALUES = st.one_of(
    st.none(), st.booleans(), st.text(max_size=30), st.integers(), st.floats(),
    st.sampled_from([1e308, -1e308, 1e-320, 2**63, 10**30, "NaN", "inf", "\0", "𝔘", "2021-02-30", "1,5", "yes"]),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.none(), max_size=1),
)  # fmt: skip
ROWS = st.lists(
    st.one_of(
        st.fixed_dictionaries({name: st.one_of(VALUES, st.just(value)) for name, value in ROW.items()}),
        st.dictionaries(st.one_of(st.sampled_from([*ROW, "response"]), st.text(max_size=5)), VALUES, max_size=6),
        VALUES,
    ),
    min_size=1, max_size=3,
)  # fmt: skip


def hostile(served, rows):
    """Ask for rows with the constants that JSON does not have, and check what comes back."""
    body = json.dumps({"rows": rows}).encode()
    (found,) = ask(served, ("POST", "/predict", {"content": body, "headers": {"content-type": "application/json"}}))
    assert found.status_code in (200, 422), (rows, found.text)
    content = found.json()
    if found.status_code == 200:
        assert len(content["predictions"]) == len(rows)
        assert all(
            math.isfinite(row[name]) for row in content["predictions"] for name in ("mean", "std", "low", "high")
        )
    else:
        assert content["field"] is not None and len(content["error"]) < 500


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=ROWS)
def test_no_row_gives_an_error_of_the_server(numbers, rows):
    hostile(numbers, rows)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=ROWS)
def test_no_row_of_very_many_gives_an_error_of_the_server(numbers, rows):
    hostile(numbers, rows)
