"""What `skip-attn` does.

    skip-attn calibrate my_script.py:build --target 0.5 --out transformer/config.json --picture curves.png
    skip-attn sensitivity my_script.py:build --config transformer/config.json --psnr 30 --out served/config.json
    skip-attn show state.json --target 0.5

my_script.py:build is a function without arguments that returns (pipe_or_model, run) or (pipe_or_model, run, items), as `calibrate` takes
them.
"""

import importlib.util
import inspect
import json
import logging
import reprlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from skip_attn_compile.calibrate import calibrate as run_calibration
from skip_attn_compile.calibrate import models_of
from skip_attn_compile.config import SkipConfig
from skip_attn_compile.files import check_writable, write_whole
from skip_attn_compile.frontier import Sensitivity
from skip_attn_compile.json_values import load
from skip_attn_compile.measurement import Measurement
from skip_attn_compile.picture import check_picture, draw
from skip_attn_compile.sensitivity import sensitivity as run_sensitivity

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help="Calibrate skip-softmax attention.")

Script = Annotated[str, typer.Argument(help="PATH.py:FUNCTION; the function returns (pipe_or_model, run[, items])")]
Target = Annotated[float | None, typer.Option(min=0, max=1, help="share of the tiles to skip")]
Gate = Annotated[float, typer.Option(min=0, max=1, help="disabled_until_timestep: calls at noise levels above it are dense; 0 is no gate")]
Out = Annotated[Path | None, typer.Option(help="config.json to write the curve into; for a pipeline, its folder")]
State = Annotated[Path | None, typer.Option(help="file that keeps what was measured; a run that was stopped goes on from it")]
Include = Annotated[list[str] | None, typer.Option(help="pattern of layers to measure; may be repeated")]
Ignore = Annotated[list[str] | None, typer.Option(help="pattern of layers to leave dense; may be repeated")]
Picture = Annotated[Path | None, typer.Option(help="where to draw points, curve and range, and shares by layer and step")]

_NO_INCLUDE = "--out cannot be used with --include, which a config.json has no place for; use --ignore"


@app.command()
def calibrate(
    script: Script,
    target: Target = None,
    gate: Gate = 0.0,
    out: Out = None,
    picture: Picture = None,
    state: State = None,
    tile_order: Annotated[str, typer.Option(help="ascending, or own_first; other servers are ascending")] = "ascending",
    tile_q: Annotated[int, typer.Option(help="rows of a tile: 64 as we serve, 128 as ModelOpt and TensorRT-LLM do")] = 64,
    include: Include = None,
    ignore: Ignore = None,
    min_kv_len: Annotated[int, typer.Option(help="calls with fewer keys stay dense")] = 1024,
) -> None:
    """Measure a model, show the curve, and write it where other tools find it."""
    included = tuple(include or ("*",))
    _check_out(out, target, included)
    pipe_or_model, run, items = _build(script)
    with _told():
        _check_places(list(models_of(pipe_or_model, "calibrate")[0]), out, picture)
        measurement = run_calibration(
            pipe_or_model,
            run,
            items,
            tile_order=tile_order,
            tile=(tile_q, 128),
            include=included,
            ignore=tuple(ignore or ()),
            min_kv_len=min_kv_len,
            state=state,
        )
        try:
            _hand_out(measurement, target, gate, out, picture)
        except BaseException:
            if state is None:
                kept = Path(tempfile.mkdtemp(prefix="skip-attn-")) / "state.json"
                measurement.save(kept)
                print(f"what was measured is in {kept}, for skip-attn show", file=sys.stderr)
            raise


@app.command()
def show(
    measurement: Annotated[Path, typer.Argument(help="a state file of `skip-attn calibrate`, or what Measurement.save wrote")],
    target: Target = None,
    gate: Gate = 0.0,
    out: Out = None,
    picture: Picture = None,
) -> None:
    """The curve of a measurement that was made before, at any target."""
    with _told():
        found = Measurement.load(measurement)
        _check_out(out, target, found.setup.include)
        _check_places(found.components, out, picture)
        _hand_out(found, target, gate, out, picture)


@app.command()
def sensitivity(
    script: Script,
    config: Annotated[Path | None, typer.Option(help="a config.json with a curve, or a pipeline's folder")] = None,
    target: Annotated[float | None, typer.Option(min=0, max=1, help="share of the tiles to skip, instead of the config's")] = None,
    threshold: Annotated[float | None, typer.Option(help="lambda, instead of a target")] = None,
    psnr: Annotated[float, typer.Option(help="the least that every item must keep, in dB against the dense run")] = 30.0,
    peak: Annotated[float | None, typer.Option(help="largest minus smallest value of the output; by default the dense run's")] = None,
    alone: Annotated[bool, typer.Option(help="one run for each layer, for its error in the final output")] = True,
    attention_share: Annotated[float, typer.Option(help="of the time of a dense run, for the speed-up of the whole")] = 1.0,
    tile_order: Annotated[str | None, typer.Option(help="ascending or own_first; by default the curve's")] = None,
    gate: Annotated[float | None, typer.Option(min=0, max=1, help="disabled_until_timestep; by default the config's")] = None,
    include: Include = None,
    ignore: Ignore = None,
    min_kv_len: Annotated[int, typer.Option(help="calls with fewer keys stay dense")] = 1024,
    state: State = None,
    out: Annotated[Path | None, typer.Option(help="config.json to write curve and proposal into; for a pipeline, its folder")] = None,
) -> None:
    """Which layers and steps to leave dense for a quality budget."""
    if config is None and threshold is None:
        raise typer.BadParameter("give --config, --threshold or both: errors are those of an operating point")
    if target is not None and (config is None or threshold is not None):
        raise typer.BadParameter("--target needs --config, whose curve says what to skip for it, and takes no --threshold")
    if out is not None and (config is None or threshold is not None or tile_order is not None):
        raise typer.BadParameter("--out needs --config, and takes no --threshold or --tile-order: a config.json holds a curve and a target")
    if out is not None and include:
        raise typer.BadParameter(_NO_INCLUDE)
    pipe_or_model, run, items = _build(script)
    given: dict[str, Any] = {"threshold": threshold, "disabled_until_timestep": gate, "tile_order": tile_order, "min_kv_len": min_kv_len}
    given |= {"target_sparsity": target, "include": include or None, "ignore": ignore or None}
    fields = {name: value for name, value in given.items() if value is not None}
    with _told():
        point = SkipConfig(**fields) if config is None else SkipConfig.from_checkpoint(config, **fields)
        _check_places(list(models_of(pipe_or_model, "sensitivity")[0]), out, None)
        options: dict[str, Any] = {"psnr": psnr, "peak": peak, "alone": alone, "attention_share": attention_share, "state": state}
        found = run_sensitivity(pipe_or_model, run, items, config=point, **options)
        print(found)
        if out is not None:
            assert config is not None
            _hand_on(found, config, out)


def _build(script: str) -> tuple[Any, Any, Any]:
    path, _, function = script.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file() or not function.isidentifier():
        raise typer.BadParameter(f"must be the path of a Python file, a colon and a function in it, as in script.py:build, got {script!r}")
    logging.basicConfig(format="%(message)s")
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(f"skip_attn_script_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses and pickle look for it
    spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build) or not _takes_nothing(build):
        raise typer.BadParameter(f"{path} must have a function {function} that takes no arguments, got {build!r}")
    built = build()
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not callable(built[1]):
        raise typer.BadParameter(
            f"{function} in {path} must return (pipe_or_model, run) or (pipe_or_model, run, items), got {reprlib.repr(built)}"
        )
    return (*built, None) if len(built) == 2 else built


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def _check_out(out: Path | None, target: float | None, include: tuple[str, ...]) -> None:
    if out is not None and target is None:
        raise typer.BadParameter("--out needs --target: a curve is fitted near the share that it is for")
    if out is not None and include != ("*",):
        raise typer.BadParameter(_NO_INCLUDE)


def _check_places(components: list[str], out: Path | None, picture: Path | None) -> None:
    """Before anything is run: ValueError where the results could not be written."""
    for component in components if out is not None else ():
        _existing(_place(out, component))
        check_writable("out", _place(out, component))
    if picture is not None:
        check_picture(picture)


def _place(out: Path | None, component: str) -> Path:
    assert out is not None
    return out / component / "config.json" if component else out


def _hand_out(measurement: Measurement, target: float | None, gate: float, out: Path | None, picture: Path | None) -> None:
    print(measurement)
    if target is not None and measurement.setup.include != ("*",):  # which a config.json has no place for
        print(f"\n{measurement.config(target, disabled_until_timestep=gate)}")
    elif target is not None:
        written = measurement.to_checkpoint(target, disabled_until_timestep=gate)
        for component, entry in written.items():
            if out is None:
                print(f"\n{component or 'model'}, for {target:.0%}\n{json.dumps(entry)}")
            else:
                _write(out, component, entry)
    if picture is not None:
        draw(measurement, picture, target, gate)
        print(f"drew {picture}")


def _hand_on(found: Sensitivity, source: Path, out: Path) -> None:
    """The config that was measured, with the proposal; beside it stays what else `source` says."""
    proposed = found.config()
    folder = source.parent if source.name == "model_index.json" else source
    by_component = (folder / "model_index.json").is_file()
    for component, config in ({"": proposed} if isinstance(proposed, SkipConfig) else proposed).items():
        if config.calibration is None:
            print(f"{component} has no curve and stays as it is")
            continue
        _write(out, component, config.to_checkpoint(folder / component if by_component else source))


def _write(out: Path, component: str, entry: dict[str, Any]) -> None:
    path = _place(out, component)
    write_whole(path, json.dumps(_existing(path) | entry, indent=2) + "\n")
    print(f"wrote {path}")


def _existing(path: Path) -> dict[str, Any]:
    """What is there: a model's config.json keeps its other keys."""
    config = load(path) if path.is_file() else {}
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object, or not exist, got {type(config).__name__}")
    return config


@contextmanager
def _told() -> Iterator[None]:
    """What this package refuses is told in a line; what fails in the user's script keeps its traceback."""
    try:
        yield
    except ValueError as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        raised = next(name for name in reversed(frames) if name != torch.__file__)  # where torch._check_value is
        if not Path(raised).is_relative_to(Path(__file__).parent):
            raise
        print(f"skip-attn: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
