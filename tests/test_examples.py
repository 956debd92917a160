"""The scripts in examples/ run, and print what shows that their method works."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def run(script: str, *arguments: str) -> str:
    """What an example prints, run as a reader would run it."""
    command = [sys.executable, "-W", "error", f"examples/{script}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_finetuning_learns_more_from_few_samples_than_training_from_scratch():
    printed = run("finetune.py", "--quick")
    tuned, scratch = map(float, re.findall(r"accuracy (\d+\.\d) %", printed))
    assert tuned > 60.0 > scratch
    assert re.search(r"^Conv1\.kernel .* frozen$", printed, re.M)
    assert re.search(r"^head\.bias .*from_name\('beta', 'bias', 'gamma'\) .* -$", printed, re.M)


def test_the_blocks_of_the_guides_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for guide in sorted((ROOT / "docs").glob("*.md")):
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", guide.read_text(), re.S)):
            program = tmp_path / f"{guide.stem}_{number}.py"
            program.write_text(block)
            runpy.run_path(str(program))
