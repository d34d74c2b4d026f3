"""All checks in their order, and the document that says what came of them; and the page that shows it: a table, and
notes on what is not as it should be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuinfer.api import Setup
from gpuinfer.lab.presenter import Note, Page, Table
from gpuinfer.lab.verify import logits_checks, probed_answers, transformers_peer
from gpuinfer.lab.verify.diffusion_checks import DiffusionChecks, half_filled
from gpuinfer.lab.verify.divergence import Difference, DivergenceJudge
from gpuinfer.lab.verify.probed_answers import Answers, RouteOptions, probe_answers
from gpuinfer.lab.verify.verify_setup import Tolerance, VerifyOptions, VerifySetup, open_setup, tolerance
from gpuinfer.report.report import environment

if TYPE_CHECKING:
    from gpuinfer.text.transformer import Decoder

SCHEMA = "gpuinfer.verify/1"
FLOAT32 = "float32"
TOKENS, TRANSFORMERS = "tokens = AutoTokenizer's", "gpuinfer = transformers"
EAGER, PLAIN = "graphs = eager", "compiled = plain torch"


@dataclass
class Verification:
    """A verification under way. `findings` grow as the checks are made; `finished` once all are."""

    options: VerifyOptions
    setup: Setup
    say: Callable[[str], None] = lambda line: None
    findings: list[Difference] = field(default_factory=list)
    finished: bool = False
    noise: float = 0.0  # how far logits are from those that float32 gives with the same weights
    _began: str = ""
    _from: float = 0.0
    _model: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return all(finding.status != "fails" for finding in self.findings)

    @property
    def tolerance(self) -> Tolerance:
        return tolerance(logits_checks.SIDES * self.noise, self.options.tolerance)

    def run(self) -> None:
        """Open the model and make all checks. Raises `UsageError` before, `WorkError` when the work fails."""
        self._began, self._from = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
        self.say("opening the model …")
        opened = open_setup(self.options, self.setup)
        try:
            self._model = {
                "fingerprint": opened.checkpoint.fingerprint,
                "family": opened.checkpoint.shape.family,
                "device": opened.facts["device"],
                "decoder": type(opened.decoder).__name__,
                "computed_in": opened.decoder.computes_in,
                "prompts": len(opened.items),
                "prompt_tokens": sum(len(item.tokens) for item in opened.items),
            }
            self.say("each prompt alone …")
            if opened.checkpoint.shape.masking is not None:
                self._check_diffusion(opened)
            else:
                self._check(opened)
            self.finished = True
        finally:
            opened.close()

    def document(self) -> dict[str, Any]:
        """The report, `gpuinfer.verify/1`."""
        return {
            "schema": SCHEMA,
            "model": self.options.model or str(self.options.checkpoint or self.options.dcp_path),
            **self._model,
            "started_at": self._began,
            "wall_s": time.perf_counter() - self._from,
            "status": "partial" if not self.finished else "done",
            "holds": self.holds and self.finished,
            "tolerance": asdict(self.tolerance),
            "from_float32": self.noise,
            "settings": self.options.model_dump(mode="json"),
            "environment": environment(self.setup, {}),
            "checks": [finding.document() for finding in self.findings],
        }

    def _check(self, opened: VerifySetup) -> None:
        """A model that goes from left to right."""
        plan = probed_answers.likeliest_route(opened)
        reference = probe_answers(opened, plan.reference)
        if self.setup.dtype != FLOAT32:
            self.say("how far that is from float32 …")
            with self._torch(opened, FLOAT32) as exact:
                exact_logits = partial(logits_checks.position_logits, exact)
                self.noise = logits_checks.distance_from_float32(opened, reference, exact_logits)
        judge = DivergenceJudge(opened, self.tolerance)
        for name, route in plan.routes:
            self._timed(name, partial(self._compared, judge, opened, name, route, reference))
        drawn = probed_answers.drawn_route(opened)
        drawn_reference = probe_answers(opened, drawn.reference)
        for name, route in drawn.routes:
            self._timed(name, partial(self._compared, judge, opened, name, route, drawn_reference))
        self._timed(EAGER, partial(self._eager, opened, judge, reference))
        self._timed(PLAIN, partial(self._plain, opened, reference))
        why = transformers_peer.missing_transformers(opened)
        if why is not None:
            for name in (TOKENS, TRANSFORMERS):
                self._timed(name, partial(skipped, name, why))
            return
        with transformers_peer.open_transformers(opened) as other:
            self._timed(TOKENS, partial(self._tokens, opened, other))
            self._timed(TRANSFORMERS, partial(self._transformers, opened, reference, other))

    def _check_diffusion(self, opened: VerifySetup) -> None:
        masks = DiffusionChecks(opened)
        reference = half_filled(opened, masks.answer_alone())
        for name, check in masks.checks():
            self._timed(name, check)
        self._timed(PLAIN, partial(self._plain, opened, reference))
        why = f"transformers has no {opened.checkpoint.shape.family} models"
        self._timed(TRANSFORMERS, partial(skipped, TRANSFORMERS, why))

    def _timed(self, name: str, check: Callable[[], Difference]) -> None:
        self.say(f"{name} …")
        began = time.perf_counter()
        finding = check()
        finding.name, finding.seconds = name, time.perf_counter() - began
        self.findings.append(finding)

    def _compared(
        self, judge: DivergenceJudge, opened: VerifySetup, name: str, route: RouteOptions, reference: Answers
    ) -> Difference:
        answers = probe_answers(opened, route)
        finding = judge.compare(name, reference, answers, (reference.route.name, route.name))
        if route.name == "shared" and not answers.cached:
            return skipped(name, "no prompt is long enough to share its beginning")
        return finding

    def _eager(self, opened: VerifySetup, judge: DivergenceJudge, reference: Answers) -> Difference:
        if not opened.facts["device"].startswith("cuda"):
            return skipped(EAGER, "CUDA graphs need a CUDA device")
        from gpuinfer.text.generator import open_generator
        from gpuinfer.text.text_options import TorchModelOptions

        slots = min(probed_answers.SOME, opened.decoder.slots)
        tuning = TorchModelOptions(slots=slots, context=opened.decoder.length, graphs=False)
        eager = open_generator(opened.spec, self.setup, tuning)
        try:
            route = probed_answers.filled_route(opened, reference.route.sampling, slots)
            answers = probe_answers(opened, replace(route, name="eager", decoder=eager.decoder))
            return judge.compare(EAGER, reference, answers, ("graphs", "eager"))
        finally:
            eager.close()

    def _plain(self, opened: VerifySetup, reference: Answers) -> Difference:
        if type(opened.decoder).__name__ != "CpuDecoder":
            return skipped(PLAIN, f"here {type(opened.decoder).__name__} serves, which is not compiled for the CPU")
        sides = ("compiled", "torch")
        with self._torch(opened, self.setup.dtype) as plain:
            other = partial(logits_checks.position_logits, plain)
            if self._by_tolerance:
                return logits_checks.compare_logits(opened, PLAIN, reference, other, sides, self.tolerance)
            with self._torch(opened, FLOAT32) as exact:
                exact_logits = partial(logits_checks.position_logits, exact)
                return logits_checks.compare_rounding(opened, PLAIN, reference, other, exact_logits, sides)

    @property
    def _by_tolerance(self) -> bool:
        """Else by the distance to float32."""
        return self.setup.dtype == FLOAT32 or self.options.tolerance is not None

    @contextmanager
    def _torch(self, opened: VerifySetup, dtype: str) -> Iterator[Decoder]:
        """A decoder in plain torch that computes in `dtype` with the weights of the one under test."""
        from gpuinfer.models.device import resolve_dtype
        from gpuinfer.text.decoder.torch_decoder import TorchDecoder

        plain = TorchDecoder(
            opened.checkpoint.shape,
            opened.checkpoint.weights(resolve_dtype(self.setup.dtype)),
            opened.decoder.device,
            resolve_dtype(dtype),
            slots=1,
            pages=opened.decoder.pages,
            length=opened.decoder.length,
            graphs=False,
        )
        try:
            yield plain
        finally:
            plain.close()

    def _tokens(self, opened: VerifySetup, other: transformers_peer.TransformersPeer) -> Difference:
        place = opened.checkpoint.language
        if place.folder is None and place.gguf is None:
            return skipped(TOKENS, "the model has no tokenizer: its tokens are bytes")
        if place.gguf is not None and place.gguf.in_pieces:
            return skipped(TOKENS, "transformers reads no GGUF file that lies in pieces in several packages")
        try:
            return transformers_peer.compare_tokens(opened, TOKENS, other)
        except transformers_peer.TransformersFailed as error:
            return skipped(TOKENS, str(error))

    def _transformers(
        self, opened: VerifySetup, reference: Answers, other: transformers_peer.TransformersPeer
    ) -> Difference:
        dtype, sides = self.setup.dtype, ("gpuinfer", "transformers")
        try:
            other.open(dtype)
            theirs = partial(other.logits, dtype)
            if self._by_tolerance:
                return logits_checks.compare_logits(opened, TRANSFORMERS, reference, theirs, sides, self.tolerance)
            other.open(FLOAT32)
            exact = partial(other.logits, FLOAT32)
            return logits_checks.compare_rounding(opened, TRANSFORMERS, reference, theirs, exact, sides)
        except transformers_peer.TransformersFailed as error:
            return skipped(TRANSFORMERS, str(error))


def skipped(name: str, why: str) -> Difference:
    return Difference(name, "skipped", why)


COLUMNS = ("check", "result", "compared", "differ by", "took")
MOST_SHOWN = 3  # faults of a check


def verify_page(document: dict[str, Any]) -> Page:
    """The checks with their results; what was skipped, the ties, the faults, and the sentence that sums it up."""
    dtype, computed = document["environment"]["dtype"], document.get("computed_in")
    number_format = dtype if computed in (None, dtype) else f"{dtype} computed in {computed}"
    title = f"{document.get('device', '')}, {number_format}, {document.get('prompts', 0)} prompts"
    verdict, rows = _verdict(document), []
    for check in document["checks"]:
        if check["status"] == "skipped":
            rows.append((check["name"], "skipped", "", "", ""))
            continue
        result = "FAILS" if check["status"] == "fails" else check["status"]
        apart = f"{check['largest_difference']:.1e}"
        if check["unit"] in ("texts", "tokens"):
            apart = ""
        elif check["ties"]:
            result += f", {check['ties']} tie{'s' if check['ties'] > 1 else ''}"
        rows.append(
            (check["name"], result, f"{check['compared']:,} {check['unit']}", apart, f"{check['seconds']:.1f} s")
        )
    return Page(
        f"verify · {document['model']} · {title}",
        verdict,
        None,
        Table(COLUMNS, rows),
        notes=[*(note for check in document["checks"] for note in _notes(check)), ("verdict", verdict)],
    )


def _notes(check: dict[str, Any]) -> Iterator[Note]:
    if check["status"] in ("skipped", "told"):
        yield check["status"], f"{check['name']}: {check['why']}"
    faults = [one for one in check["divergences"] if not one["tie"]]
    faults.sort(key=lambda one: one["theirs"])  # ours first
    for one in faults[:MOST_SHOWN] or check["divergences"][:1]:
        kind = "tie" if one["tie"] else "differs" if one["theirs"] else "failed"
        if check["unit"] == "texts":
            yield kind, f"{check['name']}: “{one['prompt']}”, token {one['position']} of the prompt: {one['why']}"
            continue
        where = f"position {one['position']}" + (" of prompt and answer" if check["unit"] == "positions" else "")
        sample = f", sample {one['sample']}" if one["sample"] else ""
        sides = "; ".join(
            f"{side} has {values[0]:.6g} for token {one['tokens'][0]} and {values[1]:.6g} for token {one['tokens'][1]}"
            for side, values in one["logits"].items()
        )
        which = f"{check['name']}: prompt {one['number']} “{one['prompt']}”{sample}"
        yield kind, f"{which}, {where}: {sides or 'no logits'}. {one['why']}"
    if len(faults) > MOST_SHOWN:
        yield "", f"and {len(faults) - MOST_SHOWN} more: see --json"
    if far := check["from_float32"]:
        sides = ", ".join(f"{side} {value:.2g}" for side, value in far.items())
        yield "float32", f"{check['name']}: logits are up to so far from float32: {sides}"


def _verdict(document: dict[str, Any]) -> str:
    named = {
        status: [check["name"] for check in document["checks"] if check["status"] == status]
        for status in ("fails", "holds", "differs", "told")
    }
    if named["fails"]:
        return f"{len(named['fails'])} of {len(document['checks'])} checks do not hold: {', '.join(named['fails'])}."
    if document["status"] == "partial":
        return "Stopped before all checks were made; those that were made hold."
    ties = sum(check["ties"] for check in document["checks"])
    aside = f" Not ours to mend: {', '.join(named['differs'])}." if named["differs"] else ""
    aside += f" Told, and not judged: {', '.join(named['told'])}." if named["told"] else ""
    return f"All {len(named['holds'])} checks that were made hold" + (f", with {ties} ties." if ties else ".") + aside
