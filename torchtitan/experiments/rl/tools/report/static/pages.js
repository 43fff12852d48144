"use strict";
// The pages Runs, Overview, Ledger and Timeline. Each takes (run number, parameters) and returns what to show.

const STATES = { running: "good", done: "good", starting: "quiet", stopped: "warning", records: "quiet", stalled: "error", failed: "error", killed: "error" };
const GOES_ON = ["starting", "running", "stalled"];

function stateText(state) {
  if (state.state === "records") return "records of an evaluation or of a play: nothing is trained here";
  const steps = state.step === null ? "no step yet" : `step ${number(state.step)}${state.steps ? ` of ${number(state.steps)}` : ""}`;
  const silent = state.silent_s !== null && GOES_ON.includes(state.state) ? `, last written ${duration(state.silent_s)} ago` : "";
  const unread = state.unread_bytes ? `, ${Math.ceil(state.unread_bytes / 2 ** 20)} MB of records not indexed yet` : "";
  const problem = state.problem ? `; the run's files can't be read: ${state.problem}` : "";
  return `${state.state}, ${steps}${silent}${unread}${problem}`;
}

function duration(seconds) {
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

async function runsPage() {
  const all = await api("api/runs");
  const lines = {};
  for (const metric of ["validation/reward", "rollout/reward_mean"]) {
    lines[metric] = {};
    for (const run of all.runs) {
      const { points } = await api(`api/runs/${run.number}/metrics?name=${encodeURIComponent(metric)}`);
      if (points.length) lines[metric][`${run.number}: ${run.name}`] = points;
    }
  }
  // A run has the same colour in each chart, also where another one lacks the metric.
  const looks = Object.fromEntries(all.runs.map((run) => [`${run.number}: ${run.name}`, nthLook(run.number)]));
  const rows = all.runs.map((run) => [link(`#/${run.number}/overview`, `${run.number}: ${run.name}`), run.tasks.join(", "), stateText(run.state)]);
  const fields = Object.entries(all.config).map(([field, values]) => [field, ...values.map((value) => (value === null ? "–" : String(value)))]);
  return [
    html("h1", {}, "Runs"),
    table(["Run", "Tasks", "State"], rows),
    html("div", { class: "charts" }, ...Object.entries(lines).filter(([, own]) => Object.keys(own).length)
      .map(([metric, own]) => lineChart({ title: metric, unit: "reward", lines: own, looks, xLabel: metric.startsWith("validation/") ? "policy version" : "step" }))),
    html("h2", {}, all.runs.length > 1 ? "Config fields that differ" : "Config"),
    table(["Field", ...all.runs.map((run) => `${run.number}: ${run.name}`)], fields, { wide: true }),
  ];
}

async function overviewPage(run, query) {
  const page = await api(`api/runs/${run}/page/overview`);
  const own = await Promise.all(query.getAll("metric").map(async (name) => {
    const { points } = await api(`api/runs/${run}/metrics?name=${encodeURIComponent(name)}`);
    return { title: name, unit: "own chart", lines: { [name]: points }, xLabel: name.startsWith("validation/") ? "policy version" : "step" };
  }));
  const smooth = Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0));
  const marked = (chart) => ({ ...chart, marks: page.state.resumes.map(({ step }) => [step, "resumed"]) });
  const clocked = query.get("x") === "time" ? (chart) => inMinutes(marked(chart), page.ended_s) : marked;
  const changed = (name, values) => {
    const wanted = new URLSearchParams(query);
    wanted.delete(name);
    for (const value of values) wanted.append(name, value);
    location.hash = `#/${run}/overview?${wanted}`;
  };
  const metric = html("input", { type: "search", list: "metrics", placeholder: "any metric", name: "metric" });
  const controls = html("form", { onsubmit: (event) => {
    event.preventDefault();
    const name = metric.value.trim();
    if (!page.metrics.includes(name)) { metric.setCustomValidity("No such metric: choose one of the list."); metric.reportValidity(); return; }
    changed("metric", [...new Set([name, ...query.getAll("metric")])]);
  } },
    html("label", {}, "Another chart", metric), html("datalist", { id: "metrics" }, ...page.metrics.map((name) => html("option", { value: name }))),
    html("button", {}, "Add"),
    own.length ? html("button", { type: "button", onclick: () => changed("metric", []) }, "Remove own charts") : null,
    html("label", {}, "Smoothing", html("input", { type: "range", name: "smooth", min: 0, max: 0.99, step: 0.01, value: smooth,
      onchange: (event) => changed("smooth", Number(event.target.value) ? [event.target.value] : []) })),
    html("label", {}, "Along", html("select", { name: "x", onchange: (event) => changed("x", event.target.value ? [event.target.value] : []) },
      html("option", { value: "" }, "steps"), html("option", { value: "time", selected: query.get("x") === "time" }, MINUTES))),
    html("span", { class: "quiet" }, "Drag over a chart to zoom in; a double click shows all of it."));
  metric.addEventListener("input", () => metric.setCustomValidity(""));
  const isRecords = page.state.state === "records";
  const hints = page.hints.map((hint) => html("li", { class: hint.severity },
    html("b", {}, hint.text), /[.)]$/.test(hint.text) ? " " : ". ", html("span", {}, `Next: ${hint.field}`), html("span", { class: "quiet" }, ` (${hint.metric})`),
    hint.page ? html("span", {}, " ", link(`#/${run}/${hint.page}`, PAGES[hint.page][0])) : null));
  return [
    html("h1", {}, page.name),
    html("p", {}, html("span", { class: STATES[page.state.state] }, stateText(page.state)),
      page.state.config_name ? html("span", { class: "quiet" }, ` · config ${page.state.config_name}`) : null,
      page.state.started ? html("span", { class: "quiet" }, ` · started ${clock(1000 * page.state.started)}`) : null,
      ...page.state.resumes.map(({ time, step }) => html("span", { class: "quiet" }, ` · resumed from step ${number(step)} at ${clock(1000 * time)}`))),
    hints.length ? html("ul", { class: "hints", "aria-label": "What is wrong" }, ...hints)
      : page.charts.length && !isRecords ? html("p", { class: "good" }, "Nothing stands out: no hint applies.") : null,
    ...(isRecords ? [] : [page.charts.length ? controls : null, html("div", { class: "charts" }, ...[...own, ...page.charts].map((chart) => lineChart({ ...clocked(chart), looks: looksOf(chart), smooth })))]),
    isRecords ? html("p", {}, link(`#/${run}/evaluations`, "Evaluations"), " has the figures, ", link(`#/${run}/rollouts`, "Rollouts"), " what was said.")
      : page.charts.length ? null : html("p", {}, "No step has been taken yet."),
  ];
}

// A metric has the same look in every run, whichever others of its chart the run has.
function looksOf({ order, lines }) {
  return Object.fromEntries((order || Object.keys(lines)).map((name, i) => [name, nthLook(i)]));
}

// A chart along the time that the steps took, in minutes, in place of their numbers.
function inMinutes(chart, ended) {
  const known = new Map(ended);
  const marks = chart.marks.filter(([x]) => known.has(x)).map(([x, text]) => [known.get(x) / 60, text]);
  const lines = Object.entries(chart.lines).map(([name, points]) => [name, points.filter(([x]) => known.has(x)).map(([x, y]) => [known.get(x) / 60, y])]);
  return { ...chart, marks, lines: Object.fromEntries(lines), xLabel: MINUTES };
}

const KINDS = ["trained", "filtered", "failed", "oversized", "untrained", "lost", "open"];
const KIND_COLOURS = [2, 3, 1, 4, 5, 6, 0];

// The look of each column of the ledger, by its name: a colour for its kind, the same in every run, and a shade and dashes for what is
// behind the slash, such as the filter's name.
function columnLooks(runs) {
  const columns = ["open", ...new Set(runs.flatMap((run) => run.columns))].sort();
  const kindOf = (column) => Math.max(0, KINDS.indexOf(column.split("/")[0]));
  return Object.fromEntries(columns.map((column) => {
    const kind = kindOf(column);
    const place = columns.filter((other) => kindOf(other) === kind).indexOf(column);
    return [column, look({ colour: KIND_COLOURS[kind], dash: kind + place, shade: place })];
  }));
}

async function ledgerPage(run) {
  const page = await api(`api/runs/${run}/page/ledger`);
  const { runs } = await api("api/runs"), looks = columnLooks(runs);
  const parts = [html("h1", {}, "Where every rollout went")];
  for (const task of page.tasks) {
    const boxes = Object.entries(task.columns).sort((a, b) => b[1] - a[1]).map(([column, count]) => ({
      name: column, count, look: looks[column], note: `${number(task.recorded[column] || 0)} recorded`,
      href: `#/${run}/rollouts?${new URLSearchParams({ task: task.task, outcome: column })}`,
    }));
    if (task.open) boxes.push({ name: "open", count: task.open, look: looks.open, note: "in flight, or waiting for a step" });
    const lines = Object.fromEntries(boxes.filter((box) => box.name in task.lines).map((box) => [box.name, task.lines[box.name]]));
    parts.push(html("h2", {}, task.task),
      html("div", { class: "beside" }, flow({ from: "dispatched", total: task.dispatched, boxes }),
        lineChart({ title: "Ended, by version", unit: "rollouts", lines, looks, xLabel: "policy version" })),
      table(["Column", "Rollouts", "Share", "Recorded"], boxes.map((box) => [
        box.href ? link(box.href, box.name) : box.name, number(box.count), percent(box.count, task.dispatched),
        box.href ? number(task.recorded[box.name] || 0) : "–"])),
      ...(task.causes.length ? [html("h3", {}, `Why rollouts of ${task.task} failed`), table(["Recorded rollouts", "First cause of its kind, in its rollout"],
        task.causes.map((one) => [number(one.count), link(`#/${run}/rollout/${one.key}`, short(one.cause, 500))]), { kind: "causes" })] : []));
  }
  if (!page.tasks.length) parts.push(html("p", {}, runs[run].state.state === "records" ? "Only a training run has a ledger." : "No rollout has ended yet."));
  return parts;
}

async function timelinePage(run, query) {
  const page = await api(`api/runs/${run}/page/timeline`);
  const traces = page.traces.map((name) => html("li", {}, link(`api/runs/${run}/traces/${encodeURIComponent(name)}`, name),
    " opens in ui.perfetto.dev or chrome://tracing"));
  const charts = [["Restarted processes", "restarts so far", page.restarts], ["Use of processes", "share of the time", page.busy]]
    .filter(([, , lines]) => Object.keys(lines).length).map(([title, unit, lines]) => lineChart({ title, unit, lines }));
  const chosen = page.processes.find((one) => one.process === query.get("process"));
  const counted = (one, count) => (count ? link(`#/${run}/timeline?${new URLSearchParams({ process: one.process })}`, number(count)) : "0");
  const events = [html("h2", {}, "Deaths, hangs and errors"),
    page.events.length ? eventList(page.events) : html("p", { class: "good" }, "Nothing: no process died, hung or logged an error. Rollouts that failed are in the Ledger.")];
  return [
    html("h1", {}, "Timeline"),
    ...(page.events.length ? events : []), // on top, where there is something
    html("div", { class: "charts" }, ...charts),
    Object.keys(page.restarts).length ? null : html("p", { class: "good" }, "No process was restarted."),
    html("h2", {}, "Profiled steps"),
    traces.length ? html("ul", {}, ...traces) : html("p", {}, "None: --profile-steps 3:5 records steps 3 to 5."),
    html("h2", {}, "Processes"),
    page.processes.length ? table(["Process", "Busy in the last step", "Busy on average", "Last line of its log", "Warnings", "Errors"],
      page.processes.map((one) => [one.process, share(one.busy), share(one.busy_mean), clock(one.last), counted(one, one.warnings), counted(one, one.errors)]))
      : html("p", {}, "The run's folder has no logs."),
    page.processes.length ? html("p", { class: "quiet" }, "Counted in the last 256 KiB of logs/PROCESS.jsonl, libraries' warnings too.") : null,
    ...(chosen ? [html("h2", {}, `Newest warnings and errors of ${chosen.process}`), eventList(chosen.listed)] : []),
    ...(page.events.length ? [] : events),
  ];
}

function eventList(events) {
  return html("ul", { class: "hints" }, ...events.map((one) => html("li", { class: one.level === "WARNING" ? "warning" : "error" },
    html("span", { class: "quiet" }, `${clock(one.time)} · ${one.process} · ${one.level}`), html("div", {}, eventText(one)))));
}

// What happened; with a traceback its last line, behind which all of it can be opened.
function eventText({ text, traceback }) {
  if (!traceback) return text;
  const last = traceback.trimEnd().split("\n").pop();
  return html("span", {}, text, html("details", {}, html("summary", {}, short(last, 500)), html("pre", {}, traceback)));
}

function share(value) {
  return value === null ? "–" : `${(100 * value).toFixed(0)} %`;
}

function clock(time) {
  return time ? new Date(time).toLocaleString() : "–";
}

function link(href, text) {
  return html("a", { href }, text);
}

// below: for each row a text that stands under it in the whole width, or "".
function table(head, rows, { wide = false, kind = null, below = [] } = {}) {
  const cells = (row) => row.map((cell, i) => html("td", wide ? { class: i ? "wide" : "field" } : {}, typeof cell === "string" ? short(cell, 2000) : cell));
  return html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": head.join(", ") },
    html("table", { class: kind }, html("thead", {}, html("tr", {}, ...head.map((name) => html("th", { scope: "col" }, name)))),
      html("tbody", {}, ...rows.flatMap((row, i) => [
        html("tr", {}, ...cells(row)),
        ...(below[i] ? [html("tr", { class: "below" }, html("td", { colspan: head.length }, html("div", {}, below[i])))] : [])]))));
}
