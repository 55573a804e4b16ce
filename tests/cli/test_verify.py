"""`graphpp verify`: the report of `graphpp.verify`, its exit code and its document."""


import pytest

from tests.cli.running import document, refusal, run, write

CODE = """
    import torch
    from torch import nn

    import graphpp

    def data(width=8):
        return graphpp.Microbatch((torch.randn(4, width),), target=torch.randn(4, width))

    def build():
        print("from the model's file")
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))), nn.functional.mse_loss, data()

    class TracedOtherwise(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            for frame in self.frames():
                x = x * 2 if "export" in frame else x
            return self.second(self.first(x))

        def frames(self):
            import sys
            frame, found = sys._getframe(), set()
            while frame:
                found.add("export" if "/torch/export/" in frame.f_code.co_filename else "other")
                frame = frame.f_back
            return sorted(found)

    def traced_otherwise():
        return TracedOtherwise(), nn.functional.mse_loss, data()

    def batch_norm():
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        return model, nn.functional.mse_loss, data()

    def refused():
        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(8, 8)
            def forward(self, x):
                return self.linear(x) if x.sum() > 0 else x
        return Counts(), nn.functional.mse_loss, data()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("models") / "models_to_verify.py", CODE))


def test_a_right_pipeline(file: str) -> None:
    result = run("verify", f"{file}:build", "--split", "1,2", "--microbatches", "3", "--schedule", "gpipe", "--memory", "full")
    assert result.exit_code == 0
    assert "3 stages on 3 ranks, GPipe, 3 microbatches" in result.stdout
    assert "ok: tolerance" in result.stdout


def test_its_document(file: str) -> None:
    found = document("verify", f"{file}:build", "--ranks", "2", "--cap", "1GiB")
    assert found["ok"]
    assert [found[each]["verdict"] for each in ("cut", "eager")] == ["equal", "equal"]
    assert found["whole_batch"] is None
    assert found["schedule"] == {"name": "1F1B", "ranks": 2, "stages": 2, "microbatches": 2}
    assert [stage["modules"] for stage in found["stages"]] == [["0 .. 1"], ["2 .. 3"]]
    assert [rank["rank"] for rank in found["memory"]] == [0, 1]


def test_a_difference_is_exit_code_1(file: str) -> None:
    found = document("verify", f"{file}:traced_otherwise", "--split", "second", code=1)
    assert not found["ok"]
    assert found["eager"]["verdict"] == "differs"
    assert "gradient of first.weight" in found["eager"]["unequal"]
    assert found["eager"]["first"]["fqn"] is not None
    result = run("verify", f"{file}:traced_otherwise", "--split", "second")
    assert result.exit_code == 1
    assert "WRONG, do not train with this pipeline" in result.stdout


def test_a_whole_batch(file: str) -> None:
    found = document("verify", f"{file}:batch_norm", "--whole-batch", "--microbatches", "2", "--split", "2", code=1)
    assert found["cut"]["verdict"] == "equal"
    assert found["whole_batch"]["verdict"] == "differs"
    assert document("verify", f"{file}:build", "--whole-batch", "--microbatches", "2")["whole_batch"]["verdict"] != "differs"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("build", "--split", "nothing"), "SplitError: the model has no module 'nothing'"),
        (("build", "--split", "Et|x"), "SplitError: the layout is not legal"),
        (("build", "--split", "1,,2"), "--split: one of the names"),
        (("build", "--memory", "7"), "memory.recompute: a fraction"),
        (("build", "--cap", "many"), "--cap: take a number of bytes"),
        (("build", "--cap", "100"), "rank 0"),
        (("build", "--schedule", "1f"), "unknown schedule '1f'"),
        (("build", "--tolerance", "-1"), "tolerance: take a relative difference"),
        (("build", "--ranks", "99999"), "ranks: take a positive integer up to"),
        (("build", "--microbatches", "9" * 30), "microbatches: take a positive integer up to"),
        (("build", "--batch", "2"), "--batch: "),
        (("refused", "--split", "linear"), "CaptureError"),
        (("nothing",), "has no nothing; its functions: data, build"),
    ],
)
def test_errors_end_with_2(file: str, arguments: tuple[str, ...], said: str) -> None:
    function, *options = arguments
    result = run("verify", f"{file}:{function}", *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert "stages on" not in result.stdout


def test_a_model_is_not_run_before_the_options_are_read(file: str) -> None:
    assert "--cap" in refusal("verify", f"{file}:build", "--cap", "many")  # `refusal` asks for an empty standard output
