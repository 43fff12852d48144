"use strict";
// The page Evaluations: what each measured, and the examples that one won or lost against another.

async function evaluationsPage(run, query) {
  const page = await api(`api/runs/${run}/page/evaluations`);
  const names = [...new Set(page.evaluations.flatMap((row) => Object.keys(row.metrics)))]
    .filter((name) => /(avg@|pass@)\d+$|\/failed$|\/truncated$/.test(name)).sort();
  const rows = page.evaluations.map((row) => [
    link(`#/${run}/rollouts?${new URLSearchParams({ outcome: "validation", version: row.version })}`, number(row.version)),
    number(row.reported), ...names.map((name) => number(row.metrics[name]))]);
  const parts = [html("h1", {}, "Evaluations"), ...failedAttempts(run, page.failures)];
  if (Object.keys(page.lines).length) {
    parts.push(html("div", { class: "charts" }, lineChart({ title: "avg@k and pass@k", unit: "share", lines: page.lines, xLabel: "policy version" })));
  }
  parts.push(rows.length ? table(["Version", "Reported with step", ...names.map((name) => name.replace("validation/", ""))], rows)
    : html("p", {}, "No evaluation has ended."));
  return [...parts, html("h2", {}, "Won and lost between two evaluations"), ...await changesParts(run, query)];
}

// Whatever figure the page shows leaves failed attempts out, so they are said first.
function failedAttempts(run, failures) {
  if (!failures.length) return [];
  const rows = failures.map((row) => [
    number(row.version), row.task, row.attempts ? `${number(row.failed)} of ${number(row.attempts)}` : number(row.failed),
    row.key ? link(`#/${run}/rollout/${row.key}`, short(row.cause, 300)) : "not recorded"]);
  return [html("ul", { class: "hints" }, html("li", { class: "warning" },
    html("b", {}, "Attempts failed"), ": they have no reward, and every mean on this page leaves them out.",
    table(["Version", "Task", "Failed", "First cause"], rows)))];
}

async function changesParts(run, query) {
  const choices = await recordedEvaluations(run);
  const own = choices.filter((choice) => choice.run === run);
  const find = (name, otherwise) => choices.find((choice) => choice.value === query.get(name)) || otherwise;
  const before = find("before", own[0] || choices[0]), after = find("after", [...own, ...choices].findLast((choice) => choice !== before));
  if (choices.length < 2) {
    return [html("p", {}, "Two recorded evaluations are needed: recorder.fraction says which share of the examples is recorded.")];
  }
  const select = (name, label, chosen) => html("label", {}, label, html("select", { name },
    ...choices.map((choice) => html("option", { value: choice.value, selected: choice === chosen }, choice.text))));
  const form = html("form", {
    onsubmit: (event) => {
      event.preventDefault();
      location.hash = `#/${run}/evaluations?${new URLSearchParams(new FormData(form))}`;
    },
  }, select("before", "Before", before), select("after", "After", after), html("button", {}, "Compare"));
  const found = await api(`api/changes?${new URLSearchParams(
    { before_run: before.run, before: before.label, after_run: after.run, after: after.label })}`);
  const { won, lost, same } = found.counts;
  const chance = found.chance < 1e-4 ? "less than 0.0001" : number(found.chance);
  return [
    held ? html("p", {}, `${before.text} against ${after.text}.`) : form,
    html("p", {}, html("b", {}, `${number(won)} won`), ", ", html("b", {}, `${number(lost)} lost`), `, ${number(same)} with the same reward`,
      found.left_out ? `, ${number(found.left_out)} not in both or without a reward` : "", ". ",
      won + lost ? `If both were equally good, counts at least this uneven would come with probability ${chance} (two-sided sign test).` : ""),
    html("div", { class: "halves" }, changedExamples("Lost", found.lost, lost), changedExamples("Won", found.won, won)),
  ];
}

function changedExamples(title, rows, total) {
  const side = ({ run, keys, reward, answered }) => html("span", {}, number(reward), " ",
    ...keys.flatMap((key, i) => [" ", link(`#/${run}/rollout/${key}`, keys.length > 1 ? `attempt ${i + 1}` : "rollout")]),
    html("span", { class: "said" }, answered));
  return html("section", {},
    html("h3", {}, rows.length < total ? `${title}: the largest ${number(rows.length)} of ${number(total)}` : title),
    rows.length ? table(["Example", "Before", "After", "Change"], rows.map((row) => [
      html("span", {}, `${row.task} ${short(row.example || "–", 80)}`, html("span", { class: "said" }, row.asked)), side(row.before), side(row.after), `${row.change > 0 ? "+" : ""}${number(row.change)}`])) : html("p", {}, "none"));
}

// Of all runs: [{run, label, value, text}].
async function recordedEvaluations(run) {
  const { runs } = await api("api/runs");
  const found = [];
  for (const one of runs) {
    if (held && one.number !== run) continue; // the exported file has each run's own first and last
    const { recorded } = await api(`api/runs/${one.number}/page/evaluations`);
    for (const { label, version, examples } of held ? [recorded[0], recorded[recorded.length - 1]].filter(Boolean) : recorded) {
      const text = `version ${version}${label.endsWith(".final") ? " (final)" : ""}, ${number(examples)} examples`;
      found.push({ run: one.number, label, value: `${one.number}:${label}`, text: runs.length > 1 ? `${one.number}: ${one.name}, ${text}` : text });
    }
  }
  return found;
}
