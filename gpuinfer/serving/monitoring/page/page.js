// The live page. Looks come as server-sent events, read by fetch and not by EventSource: that one cannot send a key, nor
// say whether it was refused. Whatever comes from the server is shown as text, and never as HTML.
"use strict";

const POINTS = 180, FEWEST = 60; // of a line, one a second: a new one is drawn as wide as the fewest would be
const SILENCE_MS = 10000; // without a look the connection is given up, and made anew
const RETRY_MS = [500, 1000, 2000, 3000];
const KEY = "gpuinfer-key";
const REASONS = {
  full: "batch was full", deadline: "deadline was near", waited: "had waited long enough", clients: "every client waited",
  gain: "waiting would not pay", cap: "reached its own limit", free: "model was free", drain: "server was closing",
};
const ERRORS = {
  failed: "failed", rejected: "refused, the queue was full", expired: "past their deadline",
  cancelled: "given up by the client", retried: "tried again",
};

const by = (id) => document.getElementById(id);

// ---- numbers for people ----

function number(value) {
  if (value === undefined || value === null || !Number.isFinite(value)) return "–";
  let size = value, unit = "";
  for (unit of ["", "k", "M", "G", "T"]) {
    if (Math.abs(size) < 999.5 || unit === "T") break;
    size /= 1000;
  }
  const digits = Math.abs(size) >= 99.95 || (!unit && Number.isInteger(size)) ? 0 : Math.abs(size) >= 9.995 ? 1 : 2;
  return size.toFixed(digits) + (unit && ` ${unit}`);
}

function time(seconds) {
  if (seconds === undefined || seconds === null) return "–";
  if (seconds >= 0.9995) return `${number(seconds)} s`;
  return seconds >= 0.0009995 ? `${number(seconds * 1e3)} ms` : `${number(seconds * 1e6)} µs`;
}

function memory(megabytes) {
  return megabytes >= 1024 ? `${number(megabytes / 1024)} GiB` : `${number(megabytes)} MiB`;
}

function span(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)} days`;
  return hours ? `${hours} h ${minutes % 60} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

const share = (part) => (part >= 0.0995 ? `${Math.round(part * 100)} %` : `${(part * 100).toFixed(1)} %`);

// ---- elements ----

function element(tag, kind = "", text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  return made;
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** One child of `parent` for each item, those that are there used again, so that nothing jumps under a reader. */
function each(parent, items, make, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, index) => {
    const child = parent.children[index] || parent.appendChild(make());
    fill(child, item, child.children);
  });
}

function facts(id, pairs) {
  const make = () => {
    const row = element("div");
    row.append(element("dt"), element("dd"));
    return row;
  };
  each(by(id), pairs, make, (_, [name, value, kind = ""], [term, told]) => {
    write(term, name);
    write(told, value);
    term.className = kind;
  });
}

/** Horizontal bars: [name, share of the whole, still], or [title]; `nothing` is said when there are none. */
function shares(id, rows, nothing) {
  const list = by(id);
  const empty = list.firstElementChild?.classList.contains("none");
  if (!rows.length) return empty ? undefined : list.replaceChildren(element("li", "none", nothing));
  if (empty) list.replaceChildren();
  const make = () => {
    const row = element("li"), bar = element("div", "bar");
    bar.append(element("span"));
    row.append(element("span"), bar, element("span", "value"));
    return row;
  };
  each(list, rows, make, (row, [name, part, still], [label, bar, value]) => {
    row.className = part === undefined ? "title" : still ? "still" : "";
    write(label, name);
    bar.firstElementChild.style.width = `${Math.min(1, part || 0) * 100}%`;
    write(value, part === undefined ? "" : share(part));
  });
}

// ---- lines ----

class Line {
  constructor(id) {
    this.svg = by(id);
    this.values = []; // [low, high or undefined]; null where the connection was lost
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.paths = ["above", "under", "line"].map((kind) => {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", kind);
      this.svg.append(path);
      return path;
    });
  }

  add(value, above) {
    this.values.push(value === undefined ? null : [value, above]);
    if (this.values.length > POINTS) this.values.shift();
    this.draw();
  }

  draw() {
    this.svg.setAttribute("viewBox", `0 0 ${this.width} 100`);
    const all = this.values.flatMap((pair) => pair || []).filter((value) => value !== undefined);
    const top = Math.max(...all, 1e-9) * 1.08;
    const runs = this.runs((pair) => pair[0], top);
    const [above, under, line] = this.paths;
    line.setAttribute("d", runs.map((run) => `M${run.join("L")}`).join(""));
    under.setAttribute("d", runs.map((run) => `M${x(run[0])},100L${run.join("L")}L${x(run.at(-1))},100Z`).join(""));
    above.setAttribute("d", this.runs((pair) => pair[1], top).map((run) => `M${run.join("L")}`).join(""));
  }

  get width() {
    return Math.max(FEWEST, this.values.length);
  }

  /** Points without a gap between them: lists of "x,y". */
  runs(of, top) {
    const runs = [[]], first = this.width - this.values.length;
    this.values.forEach((pair, index) => {
      const value = pair && of(pair);
      if (value === null || value === undefined) runs.push([]);
      else runs.at(-1).push(`${first + index + 0.5},${(100 - (value / top) * 100).toFixed(1)}`);
    });
    return runs.filter((run) => run.length);
  }
}

const x = (point) => point.split(",")[0];
const lines = Object.fromEntries(["throughput", "latency", "tokens", "queue"].map((name) => [name, new Line(`${name}-line`)]));

// ---- one look ----

function show(look) {
  const { about, rates, totals } = look;
  const model = about.model || "gpuinfer";
  write(by("model"), model);
  document.title = model === "gpuinfer" ? model : `${model} · gpuinfer`;
  const up = about.up_s === undefined ? "" : `up ${span(about.up_s)}`;
  const routed = about.policy && `routed ${about.policy}`;
  const told = [about.version && `gpuinfer ${about.version}`, about.backend, about.strategy, routed, up];
  write(by("about"), told.filter(Boolean).join(" · "));
  if (look.seconds >= 1) write(by("window"), String(Math.round(look.seconds)));
  showRates(rates, totals, look.unmasking);
  showTimes(look);
  showBatches(look.batches);
  showPlaces(look.places);
  showWorkers(look.workers);
  showErrors(look);
  showDevice(look.device);
  each(by("notices"), look.notices, () => element("li"), (row, notice) => write(row, notice));
}

function showRates(rates, totals, unmasking) {
  const text = "output_tokens" in totals;
  const main = text ? rates.output_tokens : rates.rows;
  write(by("throughput"), number(main));
  write(by("throughput-unit"), text ? "tokens/s" : "rows/s");
  lines.throughput.add(main);
  const others = text ? [["tokens in/s", number(rates.input_tokens)]] : [["rows", number(totals.rows)]];
  if (unmasking.forwards) {
    others.push(["tokens a forward", number(unmasking.tokens_per_forward)], ["computed anew", share(unmasking.computed_share)]);
  }
  facts("throughput-facts", [["requests/s", number(rates.requests)], ...others, ["requests", number(totals.requests)]]);
}

function showTimes(look) {
  const { latency_s: latency, queue_wait_s: wait, first_token_s: first, between_tokens_s: between } = look;
  write(by("latency"), time(latency.p50));
  lines.latency.add(latency.p50, latency.p95);
  facts("latency-facts", [["p95", time(latency.p95), "above"], ["p99", time(latency.p99)], ["longest", time(latency.max)]]);
  by("tokens-tile").hidden = !("output_tokens" in look.totals);
  write(by("tokens"), time(first.p50));
  lines.tokens.add(first.p50, first.p95);
  facts("tokens-facts", [["p95", time(first.p95), "above"], ["next token", time(between.p50)], ["its p95", time(between.p95)]]);
  const { queued } = look.about; // of a fleet whose router has a queue
  write(by("queue"), number(look.waiting_rows + (queued || 0)));
  lines.queue.add(look.waiting_rows + (queued || 0));
  const router = queued === undefined ? [] : [["in the router", number(queued)]];
  const waits = [["median wait", time(wait.p50)], ["p95", time(wait.p95)], ["longest", time(wait.max)]];
  facts("queue-facts", [...router, ...waits]);
}

function showBatches({ sizes, reasons, rows_mean: mean, slots }) {
  write(by("batch-mean"), mean ? `${number(mean)} rows on average${slots ? `, ${number(slots)} slots` : ""}` : "");
  const rows = Object.entries(sizes).sort(([one], [other]) => one - other), list = by("sizes");
  const most = Math.max(...rows.map(([, times]) => times), 1);
  const empty = list.firstElementChild?.classList.contains("none");
  if (!rows.length && !empty) list.replaceChildren(element("li", "none", "No batch in the last seconds."));
  if (rows.length && empty) list.replaceChildren();
  const make = () => {
    const row = element("li");
    row.append(element("span", "value"), element("div", "column"), element("span"));
    return row;
  };
  if (rows.length) each(list, rows, make, (_, [size, times], [value, column, label]) => {
    write(value, number(times));
    column.style.height = `${(times / most) * 72}%`;
    write(label, size <= 2 ? size : `≤ ${size}`);
  });
  const cut = Object.values(reasons).reduce((sum, times) => sum + times, 0);
  const named = Object.entries(reasons).sort(([, one], [, other]) => other - one);
  shares("reasons", named.map(([reason, times]) => [REASONS[reason] || reason, times / cut]), "None was cut in the last seconds.");
}

/** By kinds of lanes, each under its title. */
function showPlaces(places) {
  const kinds = [...new Set(places.map((place) => place.lane))];
  shares("places", kinds.flatMap((kind) => {
    const own = places.filter((place) => place.lane === kind);
    return [[`${kind} lanes`], ...own.map(({ station, share }) => [station, share, station === "idle"])];
  }), "Nothing has run yet.");
}

// ---- replicas ----

let served = new Map(), servedAt = 0; // name → answered, at the last look

function showWorkers(workers) {
  by("replicas").hidden = !workers.length;
  const healthy = workers.filter((worker) => worker.healthy).length;
  write(by("healthy"), workers.length ? `${healthy} of ${workers.length} healthy` : "");
  const most = Math.max(...workers.map((worker) => worker.in_flight || 0), 1);
  const now = performance.now(), seconds = (now - servedAt) / 1000;
  each(by("workers"), workers, workerRow, (row, worker, cells) => {
    const before = served.get(worker.name);
    const rate = before === undefined ? undefined : Math.max(0, worker.requests_served - before) / seconds;
    fillWorker(worker, rate, most, cells);
  });
  served = new Map(workers.map((worker) => [worker.name, worker.requests_served]));
  servedAt = now;
}

function workerRow() {
  const row = element("tr"), head = element("th"), state = element("td"), load = element("td"), bar = element("div", "bar");
  head.scope = "row";
  head.append(element("span"), element("span", "quiet wide"), element("span", "quiet event"));
  state.append(element("span", "mark"));
  bar.append(element("span"));
  const pair = element("div", "load");
  pair.append(element("span", "number"), bar);
  load.append(pair);
  row.append(head, state, load, ...["number", "number wide", "number", "number wide", "number wide"].map((kind) => element("td", kind)));
  return row;
}

function fillWorker(worker, rate, most, [head, state, load, speed, answered, errors, moved, restarts]) {
  const [name, url, event] = head.children;
  write(name, /^\d+$/.test(worker.name) ? `replica ${worker.name}` : worker.name);
  write(url, (worker.url || "").replace(/^http:\/\//, ""));
  write(event, worker.last_event || "");
  event.title = worker.last_event || ""; // whole, where two lines do not hold it
  const broken = worker.breaker && worker.breaker !== "closed";
  const word = worker.state && worker.state !== "up" ? worker.state : worker.healthy ? "healthy" : "unhealthy";
  write(state.firstElementChild, broken && worker.healthy ? `breaker ${worker.breaker}` : word);
  const ill = !worker.healthy && !["starting", "draining"].includes(worker.state);
  const well = worker.healthy && !broken && worker.state !== "late";
  state.firstElementChild.className = `mark ${ill ? "bad" : well ? "" : "warn"}`;
  const [count, bar] = load.firstElementChild.children;
  write(count, number(worker.in_flight || 0));
  bar.firstElementChild.style.width = `${((worker.in_flight || 0) / most) * 100}%`;
  write(speed, number(rate));
  write(answered, number(worker.requests_served || 0));
  write(errors, number(worker.errors || 0));
  errors.className = `number ${worker.errors ? "bad" : ""}`;
  write(moved, number((worker.retried || 0) + (worker.resumed || 0)));
  write(restarts, number(worker.restarts || 0));
}

// ---- the rest ----

function showErrors({ errors, failure }) {
  const kinds = Object.entries(errors);
  const rows = kinds.length ? kinds : [["", 0]];
  const make = () => {
    const row = element("li");
    row.append(element("span"), element("span", "value"));
    return row;
  };
  each(by("errors"), rows, make, (row, [kind, count], [name, value]) => {
    row.className = kind === "failed" ? "bad" : "";
    write(name, kind ? ERRORS[kind] || kind : "None: every request was answered.");
    write(value, kind ? number(count) : "");
  });
  write(by("failure"), failure ? `The first that failed: ${failure}` : "");
}

function showDevice({ name, each: several, utilisation, allocated_mb: taken, reserved_mb: held, rss_peak_mb: peak }) {
  const rows = [["computes on", name || "–"]];
  for (const [one, done] of Object.entries(several || {})) rows.push([one, done]);
  if (utilisation !== undefined) rows.push(["busy", share(utilisation)]);
  if (taken !== undefined) rows.push(["device memory in use", memory(taken)]);
  if (held !== undefined) rows.push(["device memory reserved", memory(held)]);
  if (peak) rows.push(["most memory of the processes", memory(peak)]);
  facts("device", rows);
}

// ---- the connection ----

function state(kind, word) {
  by("state").className = `pill ${kind}`;
  write(by("state"), word);
}

function trouble(text) {
  by("trouble").hidden = !text;
  write(by("trouble"), text);
}

function lost(since) {
  state("lost", "not connected");
  by("main").classList.add("stale");
  trouble(`The connection to the server is lost${since ? `; these are the figures of ${since}` : ""}. Trying again.`);
  Object.values(lines).forEach((line) => line.add(undefined));
}

/** The events of a stream: [name, data]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      if (fields.data) yield [fields.event, JSON.parse(fields.data)];
    }
  }
}

/** Watch until the stream ends. Returns the answer's status. */
async function watch(seen) {
  const giveUp = new AbortController(), key = sessionStorage.getItem(KEY);
  let timer = setTimeout(() => giveUp.abort(), SILENCE_MS);
  by("links").hidden = Boolean(key); // a link sends no key
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch("events", { headers, cache: "no-store", signal: giveUp.signal });
    if (!answer.ok) return answer.status;
    for await (const [name, value] of events(answer.body)) {
      clearTimeout(timer);
      timer = setTimeout(() => giveUp.abort(), SILENCE_MS);
      seen(name, value);
    }
    return answer.status;
  } finally {
    clearTimeout(timer);
    giveUp.abort();
  }
}

function askForKey() {
  write(by("refused"), sessionStorage.getItem(KEY) ? "That key was refused." : "");
  sessionStorage.removeItem(KEY);
  by("key").hidden = false;
  by("main").hidden = by("links").hidden = true;
  trouble("");
  state("", "needs a key");
  by("secret").focus();
  return new Promise((done) => by("key").addEventListener("submit", (submitted) => {
    submitted.preventDefault();
    // what no header can carry is no key: the server is left to refuse what remains of it
    sessionStorage.setItem(KEY, by("secret").value.replace(/[^\x21-\x7e]/g, "") || "?");
    by("secret").value = "";
    by("key").hidden = true;
    by("main").hidden = false;
    done();
  }, { once: true }));
}

async function run() {
  let since = "", failures = 0;
  for (;;) {
    const status = await watch((name, value) => {
      failures = 0;
      if (name !== "look") return trouble(value.message);
      state("live", value.about.status === "draining" ? "draining" : "live");
      trouble("");
      by("main").classList.remove("stale");
      since = new Date().toLocaleTimeString();
      show(value);
    }).catch(() => 0);
    if (status === 401 || status === 403) {
      await askForKey();
      continue;
    }
    if (!failures) lost(since);
    if (status === 503 && !since) trouble("The server takes no more watchers now. Trying again.");
    await new Promise((later) => setTimeout(later, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]));
  }
}

run();
