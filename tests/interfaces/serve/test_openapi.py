"""The description for other programs: requests made from it are answered as it says, and none with a 5xx."""

import contextlib

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.interfaces.serve.in_thread import at_a_port


def check_requests(served, count):
    """Make requests of every address, right ones and wrong ones, and check the answers against the description."""
    with at_a_port(served) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                with contextlib.suppress(Unsatisfiable):  # an address that takes nothing cannot be asked wrongly
                    requests_of(operation, mode, count)()


def requests_of(operation, mode, count):
    """A function that makes ``count`` requests of one kind and checks their answers."""

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        answer = case.call_and_validate(excluded_checks=[positive_data_acceptance, negative_data_rejection])
        assert answer.status_code < 500
        if case.media_type == "application/json":
            check_acceptance(answer, mode)

    return ask


def check_acceptance(answer, mode):
    """What fits the description is answered, but for numbers and dates too far away to compute with; else refused."""
    if mode == GenerationMode.NEGATIVE:
        assert 400 <= answer.status_code < 500, answer.text
    elif answer.status_code != 200:
        assert answer.status_code == 422 and answer.json()["field"] in ("dose", "day", "x", "z", "rows"), answer.text


@pytest.mark.parametrize("name", ["numbers", "classes", "tensors"])
def test_requests_made_from_the_description(name, request):
    check_requests(request.getfixturevalue(name), 10)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["numbers", "classes", "tensors"])
def test_very_many_requests_made_from_the_description(name, request):
    check_requests(request.getfixturevalue(name), 100)


def test_the_examples_are_answered(numbers, classes, tensors):
    for served in (numbers, classes, tensors):
        with at_a_port(served) as address:
            paths = httpx.get(f"{address}/openapi.json").json()["paths"]
            for path in ("/predict", "/explain"):
                content = paths[path]["post"]["requestBody"]["content"]
                answer = httpx.post(address + path, json=content["application/json"]["example"])
                assert answer.status_code == 200, answer.text
                csv = content["text/csv"]["example"]
                answer = httpx.post(address + path, content=csv, headers={"content-type": "text/csv"})
                assert answer.status_code == 200, answer.text
