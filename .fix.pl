undef $/;
sub edit { my ($f, @subs) = @_; open F, $f or die $f; my $t = <F>; close F; for my $s (@subs) { my ($a, $b) = @$s; my $i = index($t, $a); die "not found in $f: $a" if $i < 0; substr($t, $i, length $a) = $b; } open F, ">$f"; print F $t; close F; }
edit("tests/core/test_posterior.py", ["\@pytest.fixture
def with_statistics():
    yield _WithStatistics
    kn.Posterior.families.pop(_WithStatistics.family, None)


", "del kn.Posterior.families[_WithStatistics.family]  # it is for the tests below alone


"], ["run_in_another_way(with_statistics, memory, generator):", "run_in_another_way(memory, generator):"],
["    posterior = with_statistics(model, plain.stack, plain.log_weights, shift=2.0)", "    posterior = _WithStatistics(model, plain.stack, plain.log_weights, shift=2.0)"],
["def test_settings_come_back_from_disk(with_statistics, generator, tmp_path):", "def test_settings_come_back_from_disk(generator, tmp_path, monkeypatch):"],
["    posterior = with_statistics(plain.model, plain.stack, plain.log_weights, shift=0.1)
    kn.Posterior.families[with_statistics.family] = with_statistics
", "    posterior = _WithStatistics(plain.model, plain.stack, plain.log_weights, shift=0.1)
    monkeypatch.setitem(kn.Posterior.families, _WithStatistics.family, _WithStatistics)
"]);
edit("tests/inference/dropout/test_augmented.py", ["    (\"settings\", \"named\"), [({\"method\": kn.MAP}, \"method\"), ({\"augment\": 0.1}, \"augment\"), ({\"augment\": kn.Flip}, \"augment\")]
", "    (\"settings\", \"named\"),
    [({\"method\": kn.MAP}, \"method\"), ({\"augment\": 0.1}, \"augment\"), ({\"augment\": kn.Flip}, \"augment\")],
"]);
edit("tests/inference/dropout/test_mc_dropout.py", ["# How close a fit comes to the maximum of its bound, in nats: what Adam's last, small steps leave. Measured on ten seeds:
# at most 0.05. Masks", "# How close a fit comes to the maximum of its bound, in nats: what Adam's last, small steps leave. Measured on ten
# seeds: at most 0.05. Masks"]);
