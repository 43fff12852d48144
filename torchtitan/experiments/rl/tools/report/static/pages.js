"use strict";
// The pages Runs, Overview, Ledger and Timeline. Each takes (run number, parameters) and returns what to show.

const STATES = { running: "good", done: "good", starting: "quiet", stopped: "warning", stalled: "error" };

function stateText(state) {
  const steps = state.step === null ? "no step yet" : `step ${number(state.step)}${state.steps ? ` of ${number(state.steps)}` : ""}`;
  const silent = state.silent_s !== null && state.state !== "done" ? `, last written ${duration(state.silent_s)} ago` : "";
  const unread = state.unread_bytes ? `, ${(state.unread_bytes / 2 ** 20).toFixed(0)} MB of records not indexed yet` : "";
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
  const rows = all.runs.map((run) => [link(`#/${run.number}/overview`, `${run.number}: ${run.name}`), run.tasks.join(", "), stateText(run.state)]);
  const fields = Object.entries(all.config).map(([field, values]) => [field, ...values.map((value) => (value === null ? "–" : String(value)))]);
  return [
    html("h1", {}, "Runs"),
    table(["Run", "Tasks", "State"], rows),
    html("div", { class: "charts" }, ...Object.entries(lines).filter(([, own]) => Object.keys(own).length)
      .map(([metric, own]) => lineChart({ title: metric, unit: "reward", lines: own, xLabel: metric.startsWith("validation/") ? "policy version" : "step" }))),
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
  const clocked = query.get("x") === "time" ? (chart) => inMinutes(chart, page.ended_s) : (chart) => chart;
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
  const hints = page.hints.map((hint) => html("li", { class: hint.severity },
    html("b", {}, hint.text), ". ", html("span", {}, `Next: ${hint.field}`), html("span", { class: "quiet" }, ` (${hint.metric})`)));
  return [
    html("h1", {}, page.name),
    html("p", {}, html("span", { class: STATES[page.state.state] }, stateText(page.state)),
      page.state.config_name ? html("span", { class: "quiet" }, ` · config ${page.state.config_name}`) : null,
      page.state.started ? html("span", { class: "quiet" }, ` · started ${new Date(1000 * page.state.started).toLocaleString()}`) : null),
    hints.length ? html("ul", { class: "hints", "aria-label": "What is wrong" }, ...hints)
      : html("p", { class: "good" }, "Nothing stands out: no hint applies."),
    page.charts.length ? controls : null,
    html("div", { class: "charts" }, ...[...own, ...page.charts].map((chart) => lineChart({ ...clocked(chart), smooth }))),
    page.charts.length ? null : html("p", {}, "No step has been taken yet."),
  ];
}

// A chart along the time that the steps took, in minutes, in place of their numbers.
function inMinutes(chart, ended) {
  const known = new Map(ended);
  const lines = Object.entries(chart.lines).map(([name, points]) => [name, points.filter(([x]) => known.has(x)).map(([x, y]) => [known.get(x) / 60, y])]);
  return { ...chart, lines: Object.fromEntries(lines), xLabel: MINUTES };
}

async function ledgerPage(run) {
  const page = await api(`api/runs/${run}/page/ledger`);
  const parts = [html("h1", {}, "Where every rollout went")];
  for (const task of page.tasks) {
    const boxes = Object.entries(task.columns).sort((a, b) => b[1] - a[1]).map(([column, count]) => ({
      name: column, count, note: `${number(task.recorded[column] || 0)} recorded`,
      href: `#/${run}/rollouts?${new URLSearchParams({ task: task.task, outcome: column })}`,
    }));
    if (task.open) boxes.push({ name: "open", count: task.open, note: "in flight, or waiting for a step" });
    const lines = Object.fromEntries(boxes.filter((box) => box.name in task.lines).map((box) => [box.name, task.lines[box.name]]));
    parts.push(html("h2", {}, task.task),
      html("div", { class: "beside" }, flow({ from: "dispatched", total: task.dispatched, boxes }),
        lineChart({ title: "Ended, by version", unit: "rollouts", lines, xLabel: "policy version", style: 1 })),
      table(["Column", "Rollouts", "Share", "Recorded"], boxes.map((box) => [
        box.href ? link(box.href, box.name) : box.name, number(box.count), percent(box.count, task.dispatched),
        box.href ? number(task.recorded[box.name] || 0) : "–"])));
  }
  if (!page.tasks.length) parts.push(html("p", {}, "No rollout has ended yet."));
  return parts;
}

async function timelinePage(run) {
  const page = await api(`api/runs/${run}/page/timeline`);
  const traces = page.traces.map((name) => html("li", {}, link(`api/runs/${run}/traces/${encodeURIComponent(name)}`, name),
    " opens in ui.perfetto.dev or chrome://tracing"));
  const charts = [["Restarted processes", "restarts so far", page.restarts], ["Use of processes", "share of the time", page.busy]]
    .filter(([, , lines]) => Object.keys(lines).length).map(([title, unit, lines]) => lineChart({ title, unit, lines }));
  return [
    html("h1", {}, "Timeline"),
    html("div", { class: "charts" }, ...charts),
    Object.keys(page.restarts).length ? null : html("p", { class: "good" }, "No process was restarted."),
    html("h2", {}, "Profiled steps"),
    traces.length ? html("ul", {}, ...traces) : html("p", {}, "None: --profile-steps 3:5 records steps 3 to 5."),
    html("h2", {}, "Processes"),
    page.processes.length ? table(["Process", "Busy in the last step", "Busy on average", "Last line of its log", "Warnings", "Errors"],
      page.processes.map((one) => [one.process, share(one.busy), share(one.busy_mean), clock(one.last), number(one.warnings), number(one.errors)]))
      : html("p", {}, "The run's folder has no logs."),
    page.processes.length ? html("p", { class: "quiet" }, "Counted in the last 256 KiB of logs/PROCESS.jsonl, libraries' warnings too.") : null,
    html("h2", {}, "Deaths, hangs and errors"),
    page.events.length ? table(["Time", "Process", "Level", "Event"],
      page.events.map((one) => [clock(one.time), one.process, one.level, one.text]), { wide: true })
      : html("p", { class: "good" }, "Nothing: no process died, hung or logged an error."),
  ];
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

function table(head, rows, { wide = false } = {}) {
  const cells = (row) => row.map((cell, i) => html("td", wide ? { class: i ? "wide" : "field" } : {}, typeof cell === "string" ? short(cell, 2000) : cell));
  return html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": head.join(", ") },
    html("table", {}, html("thead", {}, html("tr", {}, ...head.map((name) => html("th", { scope: "col" }, name)))),
      html("tbody", {}, ...rows.map((row) => html("tr", {}, ...cells(row))))));
}
