"""The content of a report is right before anything is drawn."""

import json

from tests.interfaces.cases import whole_report


def test_a_report_is_plain_data(generator):
    content = whole_report(generator, "label").to_dict()
    again = json.loads(json.dumps(content))
    assert again["sections"][0]["tables"][0]["rows"][0][0] == "label"
    kinds = [panel["kind"] for panel in again["sections"][0]["panels"]]
    own = ["truth", "lines", "bars", "forest", "dependence", "dependence", "traces"]
    assert kinds == ["band", "noise", "calibration", "calibration", "curves", *own, "pictures"]
