"""All checks in their order, and the document that says what came of them.

What is said of a verification: a table, and notes on what is not as it should be.
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
from gpuinfer.lab.verify import logits_checks, probed_answers, transformers_peer
from gpuinfer.lab.verify.diffusion_checks import DiffusionChecks, half_filled
from gpuinfer.lab.verify.divergence import Difference, DivergenceJudge, divergence_document
from gpuinfer.lab.verify.probed_answers import Answers, probe_answers
from gpuinfer.lab.verify.verify_setup import Tolerance, VerifyOptions, VerifySetup, open_setup, tolerance
from gpuinfer.report.report import environment

if TYPE_CHECKING:
    from gpuinfer.text.transformer import Decoder

SCHEMA = "gpuinfer.verify/1"
FLOAT32 = "float32"
TOKENS, TRANSFORMERS = "tokens = AutoTokenizer's", "gpuinfer = transformers"

Say = Callable[[str], None]
Check = Callable[[], Difference]


@dataclass
class Verification:
    """A verification under way. `findings` grow as the checks are made; `finished` once all are."""

    options: VerifyOptions
    setup: Setup
    say: Say = lambda line: None
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
                "computed_in": opened.computed_in,
                "prompts": len(opened.items),
                "prompt_tokens": sum(len(item.tokens) for item in opened.items),
            }
            self._run(opened)
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
            "checks": [_described(finding) for finding in self.findings],
        }

    def _run(self, opened: VerifySetup) -> None:
        if opened.checkpoint.shape.masking is not None:
            self._fill_in(opened)
            return
        plan = probed_answers.likeliest_route(opened)
        self.say("each prompt alone …")
        reference = probe_answers(opened, plan.reference)
        if self.setup.dtype != FLOAT32:
            self.say("how far that is from float32 …")
            with self._torch(opened, FLOAT32) as exact:
                self.noise = logits_checks.distance_from_float32(
                    opened, reference, partial(logits_checks.position_logits, exact)
                )
        judge = DivergenceJudge(opened, self.tolerance)
        self._make(judge, opened, plan, reference)
        for other in probed_answers.drawn_routes(opened):
            self._make(judge, opened, other, probe_answers(opened, other.reference))
        self._timed("graphs = eager", partial(self._eager, opened, judge, reference))
        self._timed("compiled = plain torch", partial(self._plain, opened, reference))
        self._peers(opened, reference)

    def _fill_in(self, opened: VerifySetup) -> None:
        """Of a diffusion model."""
        masks = DiffusionChecks(opened)
        self.say("each prompt alone …")
        reference = half_filled(opened, masks.alone())
        for name, check in masks.checks():
            self._timed(name, check)
        self._timed("compiled = plain torch", partial(self._plain, opened, reference))
        family = opened.checkpoint.shape.family
        self._timed(TRANSFORMERS, partial(skipped, TRANSFORMERS, f"transformers has no {family} models"))

    def _make(
        self, judge: DivergenceJudge, opened: VerifySetup, plan: probed_answers.AnswerRoute, reference: Answers
    ) -> None:
        for name, route in plan.routes:
            self._timed(name, partial(self._compared, judge, opened, name, route, reference))

    def _timed(self, name: str, check: Check) -> None:
        self.say(f"{name} …")
        began = time.perf_counter()
        finding = check()
        finding.name, finding.seconds = name, time.perf_counter() - began
        self.findings.append(finding)

    def _compared(
        self, judge: DivergenceJudge, opened: VerifySetup, name: str, route: Any, reference: Answers
    ) -> Difference:
        answers = probe_answers(opened, route)
        finding = judge.compare(name, reference, answers, (reference.route.name, route.name))
        if route.name == "shared" and not answers.cached:
            return skipped(name, "no prompt is long enough to share its beginning")
        return finding

    def _eager(self, opened: VerifySetup, judge: DivergenceJudge, reference: Answers) -> Difference:
        name = "graphs = eager"
        if not opened.facts["device"].startswith("cuda"):
            return skipped(name, "CUDA graphs need a CUDA device")
        from gpuinfer.text.generator import Tuning, open_generator

        slots = min(probed_answers.SOME, opened.decoder.slots)
        tuning = Tuning(slots=slots, context=opened.decoder.length, graphs=False)
        eager = open_generator(opened.spec, self.setup, tuning)
        try:
            route = probed_answers.filled_route(opened, reference.route.sampling, slots)
            answers = probe_answers(opened, replace(route, name="eager", decoder=eager.decoder))
            return judge.compare(name, reference, answers, ("graphs", "eager"))
        finally:
            eager.close()

    def _plain(self, opened: VerifySetup, reference: Answers) -> Difference:
        name = "compiled = plain torch"
        if type(opened.decoder).__name__ != "CpuDecoder":
            return skipped(name, f"here {type(opened.decoder).__name__} serves, which is not compiled for the CPU")
        sides = ("compiled", "torch")
        with self._torch(opened, self.setup.dtype) as plain:
            other = partial(logits_checks.position_logits, plain)
            if self._by_tolerance:
                return logits_checks.compare_logits(opened, name, reference, other, sides, self.tolerance)
            with self._torch(opened, FLOAT32) as exact:
                return logits_checks.compare_rounding(
                    opened, name, reference, other, partial(logits_checks.position_logits, exact), sides
                )

    @property
    def _by_tolerance(self) -> bool:
        """Else by the distance to float32."""
        return self.setup.dtype == FLOAT32 or self.options.tolerance is not None

    @contextmanager
    def _torch(self, opened: VerifySetup, dtype: str) -> Iterator[Decoder]:
        """A decoder in plain torch that computes in `dtype` with the weights of the one under test."""
        from gpuinfer.models.device import resolve_dtype
        from gpuinfer.text.decoder.torch_decoder import TorchDecoder

        shape, device = opened.checkpoint.shape, opened.decoder.device
        weights = opened.checkpoint.weights(resolve_dtype(self.setup.dtype))
        plain = TorchDecoder(
            shape,
            weights,
            device,
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

    def _peers(self, opened: VerifySetup, reference: Answers) -> None:
        """Both checks against transformers, in one process."""
        why = transformers_peer.missing_transformers(opened)
        if why is not None:
            for name in (TOKENS, TRANSFORMERS):
                self._timed(name, partial(skipped, name, why))
            return
        with transformers_peer.open_transformers(opened) as other:
            self._timed(TOKENS, partial(self._tokens, opened, other))
            self._timed(TRANSFORMERS, partial(self._transformers, opened, reference, other))

    def _tokens(self, opened: VerifySetup, other: transformers_peer.TransformersPeer) -> Difference:
        if why := transformers_peer.missing_tokenizer(opened):
            return skipped(TOKENS, why)
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
            return logits_checks.compare_rounding(
                opened, TRANSFORMERS, reference, theirs, partial(other.logits, FLOAT32), sides
            )
        except transformers_peer.TransformersFailed as error:
            return skipped(TRANSFORMERS, str(error))


def skipped(name: str, why: str) -> Difference:
    return Difference(name, "skipped", why)


def _described(finding: Difference) -> dict[str, Any]:
    return {
        "name": finding.name,
        "status": finding.status,
        "why": finding.why,
        "compared": finding.compared,
        "unit": finding.unit,
        "largest_difference": finding.difference,
        "from_float32": finding.from_float32,
        "ties": finding.ties,
        "seconds": finding.seconds,
        "divergences": [divergence_document(one) for one in finding.divergences],
    }


COLUMNS = ("check", "result", "compared", "differ by", "took")
MOST_SHOWN = 3  # faults of a check


def verify_heading(document: dict[str, Any]) -> str:
    dtype, computed = document["environment"]["dtype"], document.get("computed_in")
    format = dtype if computed in (None, dtype) else f"{dtype} computed in {computed}"
    said = f"{document.get('device', '')}, {format}, {document.get('prompts', 0)} prompts"
    return f"verify · {document['model']} · {said}"


def verify_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    return [_row(check) for check in document["checks"]]


def verify_notes(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What was skipped, the ties, the faults, and the sentence that sums it up."""
    for check in document["checks"]:
        if check["status"] in ("skipped", "told"):
            yield check["status"], f"{check['name']}: {check['why']}"
        faults = [one for one in check["divergences"] if not one["tie"]]
        faults.sort(key=lambda one: one["theirs"])  # ours first
        for one in faults[:MOST_SHOWN] or check["divergences"][:1]:
            yield ("tie" if one["tie"] else "differs" if one["theirs"] else "failed"), _said(check, one)
        if len(faults) > MOST_SHOWN:
            yield "", f"and {len(faults) - MOST_SHOWN} more: see --json"
        if far := check["from_float32"]:
            sides = ", ".join(f"{side} {value:.2g}" for side, value in far.items())
            yield "float32", f"{check['name']}: logits are up to so far from float32: {sides}"
    yield "verdict", _verdict(document)


def _row(check: dict[str, Any]) -> tuple[str, ...]:
    ties = f", {check['ties']} tie{'s' if check['ties'] > 1 else ''}" if check["ties"] else ""
    if check["status"] == "skipped":
        return check["name"], "skipped", "", "", ""
    compared = f"{check['compared']:,} {check['unit']}"
    result = "FAILS" if check["status"] == "fails" else check["status"]
    if check["unit"] in ("texts", "tokens"):
        return check["name"], result, compared, "", f"{check['seconds']:.1f} s"
    return check["name"], f"{result}{ties}", compared, f"{check['largest_difference']:.1e}", f"{check['seconds']:.1f} s"


def _said(check: dict[str, Any], one: dict[str, Any]) -> str:
    if check["unit"] == "texts":
        return f"{check['name']}: “{one['prompt']}”, token {one['position']} of the prompt: {one['why']}"
    where = f"position {one['position']}" + (" of prompt and answer" if check["unit"] == "positions" else "")
    sample = f", sample {one['sample']}" if one["sample"] else ""
    sides = "; ".join(
        f"{side} has {values[0]:.6g} for token {one['tokens'][0]} and {values[1]:.6g} for token {one['tokens'][1]}"
        for side, values in one["logits"].items()
    )
    which = f"{check['name']}: prompt {one['number']} “{one['prompt']}”{sample}"
    return f"{which}, {where}: {sides or 'no logits'}. {one['why']}"


def _verdict(document: dict[str, Any]) -> str:
    failed = [check["name"] for check in document["checks"] if check["status"] == "fails"]
    if failed:
        return f"{len(failed)} of {len(document['checks'])} checks do not hold: {', '.join(failed)}."
    if document["status"] == "partial":
        return "Stopped before all checks were made; those that were made hold."
    ties = sum(check["ties"] for check in document["checks"])
    named = {
        status: [check["name"] for check in document["checks"] if check["status"] == status]
        for status in ("holds", "differs", "told")
    }
    aside = f" Not ours to mend: {', '.join(named['differs'])}." if named["differs"] else ""
    aside += f" Told, and not judged: {', '.join(named['told'])}." if named["told"] else ""
    return f"All {len(named['holds'])} checks that were made hold" + (f", with {ties} ties." if ties else ".") + aside
