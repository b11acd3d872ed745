from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from scipy.stats import binom, kstest

import knowable as kn
from knowable.decisions.stream_alarm import _POWERS, _kept


def ranks(alarm: kn.StreamAlarm, scores: list[float]) -> list[float]:
    found = []
    rank = alarm._rank
    alarm._rank = lambda score: found.append(rank(score)) or found[-1]  # type: ignore[method-assign]
    alarm.update(scores)
    return found


def test_wealth_is_the_mixture_over_beginnings_and_bets(generator: torch.Generator):
    alarm = kn.StreamAlarm(torch.rand(30, generator=generator), delta=0.01)
    p = ranks(alarm, torch.rand(25, generator=generator).tolist())
    bets = [lambda p, e=e: e * p ** (e - 1) for e in _POWERS] + [lambda p, e=e: e * (1 - p) ** (e - 1) for e in _POWERS]
    for n in range(1, 26):
        wealth = _kept(n)
        for begin in range(1, n + 1):
            products = [math.prod(bet(each) for each in p[begin - 1 : n]) for bet in bets]
            wealth += (_kept(begin - 1) - _kept(begin)) * sum(products) / len(bets)
        assert alarm.wealth[n - 1].item() == pytest.approx(wealth, rel=1e-9)
    assert _kept(0) == 1


def test_every_bet_is_fair():
    p = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 2_000_000
    for power in _POWERS:
        assert (power * p ** (power - 1)).mean().item() == pytest.approx(1.0, abs=2 * (1 / 2_000_000) ** power)


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_of_an_exchangeable_stream_are_uniform_and_do_not_depend_on_each_other(seed: int, ties: bool):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3000, generator=generator, dtype=torch.float64)
    scores = scores.round() if ties else scores
    p = torch.tensor(ranks(kn.StreamAlarm(scores[:100], seed=seed), scores[100:].tolist()))
    assert kstest(p.numpy(), "uniform").pvalue > 1e-4
    assert abs(torch.corrcoef(torch.stack([p[1:], p[:-1]]))[0, 1]) < 4 / len(p) ** 0.5


def test_false_alarms_are_rarer_than_promised_over_whole_streams(seed: int):
    generator = torch.Generator().manual_seed(seed)
    raised = 0
    for number in range(150):
        scores = torch.randn(450, generator=generator).exp()
        raised += kn.StreamAlarm(scores[:50], delta=0.1, seed=number).update(scores[50:])
    assert raised <= binom.ppf(0.9999, 150, 0.1)


@pytest.mark.parametrize("shift", [3.0, -3.0])
def test_a_change_is_noticed_soon_however_late_it_comes(seed: int, shift: float):
    generator = torch.Generator().manual_seed(seed)
    for quiet in (0, 3000):
        alarm = kn.StreamAlarm(torch.randn(500, generator=generator), delta=0.01)
        assert not alarm.update(torch.randn(quiet, generator=generator)) if quiet else not alarm.alarmed
        assert alarm.update(shift + torch.randn(60, generator=generator))
        assert quiet < alarm.alarm_at <= quiet + 40


def test_a_stream_in_pieces_or_saved_between_them_is_the_same_stream(tmp_path: Path, generator: torch.Generator):
    reference, scores = torch.randn(40, generator=generator).round(), torch.randn(60, generator=generator).round()
    whole, parts = (kn.StreamAlarm(reference, delta=0.05, seed=3) for _ in range(2))
    whole.update(scores)
    for each in scores[:20]:
        parts.update(each)
    parts.save(tmp_path / "alarm.json")
    parts = kn.StreamAlarm.load(tmp_path / "alarm.json")
    parts.update(scores[20:])
    assert torch.equal(parts.wealth, whole.wealth)
    assert parts.to_json() == whole.to_json()
    assert kn.StreamAlarm.from_json(json.loads(json.dumps(whole.to_json()))).alarm_at == whole.alarm_at


def test_an_alarm_stays_and_says_when():
    alarm = kn.StreamAlarm(range(100), delta=0.01)
    assert not alarm.update([40.0, 70.0, 12.0])
    assert "not raised" in repr(alarm)
    assert alarm.update(range(200, 230))
    raised = alarm.alarm_at
    assert alarm.update([50.0])
    assert alarm.alarm_at == raised
    assert f"raised after {raised} rows" in repr(alarm)
    assert alarm.wealth[raised - 1] >= 100 > alarm.wealth[raised - 2]
    assert f"Alarm after {raised} rows" in alarm.plot().axes[0].get_title()


def test_a_certificate_watches_its_own_scores():
    from .test_certify import numbers

    posterior, x, y = numbers()
    certificate = kn.certify(posterior, (x[:500], y[:500]))
    alarm = certificate.watch()
    assert alarm.delta == certificate.delta
    assert not alarm.update(certificate.predict(x[500:600]).novelty)
    assert alarm.update(certificate.predict(x[600:640] + 9).novelty)
    total = kn.StreamAlarm(posterior.predict(x[:500]))
    assert not total.update(posterior.predict(x[500:600]))


def test_scores_that_are_none_are_refused(tmp_path: Path):
    with pytest.raises(kn.InvalidData, match="reference is empty"):
        kn.StreamAlarm([])
    with pytest.raises(kn.InvalidArgument, match="delta"):
        kn.StreamAlarm([1.0], delta=0.0)
    with pytest.raises(kn.InvalidData, match="missing or infinite score in row 1"):
        kn.StreamAlarm([1.0]).update([1.0, math.nan])
    with pytest.raises(kn.InvalidType, match="one score a row"):
        kn.StreamAlarm([1.0]).update(torch.zeros(3, 2))
    with pytest.raises(kn.DamagedArtifact, match="There is no file"):
        kn.StreamAlarm.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(kn.DamagedArtifact, match="not a saved alarm"):
        kn.StreamAlarm.load(tmp_path / "bad.json")
    with pytest.raises(kn.DamagedArtifact, match="not the state"):
        kn.StreamAlarm.from_json({"scores": [1.0]})
