"""The house: imports run one way, reading needs no torch, names can be imported from the top."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import app
import moe_core
import recorder

ROOT = Path(__file__).parent.parent


def test_imports_run_one_way():
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([str(lint)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("modules", [["moe_core", "recorder", "recorder.reader", "recorder.cli", "moe_core.metrics"]])
def test_reading_loads_no_torch(modules):
    code = "import sys\n" + "".join(f"import {name}\n" for name in modules) + "assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_module_of_the_app_loads_torch():
    names = [m.name for m in pkgutil.walk_packages(app.__path__, "app.") if m.name != "app.main"]
    assert len(names) > 10
    code = "import sys\n" + "".join(f"import {name}\n" for name in names) + "assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", [moe_core, recorder])
def test_names_at_the_top(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = package.nothing_here


def test_shapes_in_the_design_hold():
    expected = {"TopKRouter", "MoELayer", "MoETransformer", "MoETransformerConfig", "NoBalancer", "SwitchAuxLoss"}
    expected |= {"RouterZLoss", "SignBiasBalancer", "QuantileBalancer", "Routing"}
    assert expected <= set(moe_core.__all__)
    assert set(recorder.__all__) == {"RoutingRecorder", "Run", "RunWriter", "list_runs"}


def test_no_benchmark_hides_a_package():  # a script's own folder comes first on the path
    names = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    assert len(names) > 5
    assert names & {"app", "moe_core", "recorder", *sys.stdlib_module_names} == set()
