"use strict";
// The page Rollouts: the list with its filters, a group side by side, one rollout, and its tokens.

async function rolloutsPage(run, query) {
  const page = await api(`api/runs/${run}/rollouts?${query}`);
  const chosen = (name) => query.get(name) || "";
  const select = (name, label, values) => html("label", {}, label, html("select", { name },
    html("option", { value: "" }, "any"), ...values.map((value) => html("option", { value, selected: chosen(name) === value }, value))));
  const input = (name, label, type) => html("label", {}, label, html("input", { name, type, step: "any", value: chosen(name) }));
  const form = html("form", {
    onsubmit: (event) => {
      event.preventDefault();
      const wanted = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
      if (wanted.get("text")) document.querySelector("main [role=status]").textContent = `Searching the texts for “${wanted.get("text")}” …`;
      location.hash = `#/${run}/rollouts?${wanted}`;
    },
  },
    select("task", "Task", page.choices.task), select("outcome", "Outcome", page.choices.outcome),
    select("status", "Status", page.choices.status), input("step", "Trained in step", "number"), input("version", "Started at version", "number"), input("min_reward", "Least reward", "number"),
    input("max_reward", "Highest reward", "number"), input("group", "Group", "text"), input("text", "Text", "search"),
    html("label", {}, "Order", html("select", { name: "sort" },
      ...page.choices.sort.map((value) => html("option", { value, selected: chosen("sort") === value }, value)))), html("button", {}, "Show"));
  const rows = page.rows.map((row) => [
    link(`#/${run}/rollout/${row.key}`, row.rollout_id), number(row.reward), html("span", { class: "begin" }, row.asked), html("span", { class: "begin" }, row.answered), row.outcome || "–", row.status, number(row.step), number(row.version), row.task,
    number(row.turns), number(row.tokens), link(`#/${run}/group/${row.place}`, "group")]);
  const counted = page.evaluated ? `: ${number(page.total - page.evaluated)} of training, ${number(page.evaluated)} of evaluations` : "";
  const parts = [html("h1", {}, "Rollouts"), form,
    html("p", { class: "quiet", role: "status" }, chosen("text")
      ? `${number(page.rows.length)} with the text shown, searched for in ${page.next === null ? "all" : "a part"} of ${number(page.total)}${counted}.`
      : `${number(page.rows.length)} of ${number(page.total)} shown${counted}.`)];
  if (rows.length) parts.push(table(["Rollout", "Reward", "Asked", "Answered", "Outcome", "Status", "Trained in step", "Started at version", "Task", "Turns", "Tokens", "Side by side"], rows,
    { kind: "rollouts", below: page.rows.map((row) => row.error) }));
  else parts.push(html("p", {}, "No recorded rollout matches. recorder.fraction says which share is recorded."));
  if (page.next !== null) {
    const more = new URLSearchParams(query);
    more.set("offset", page.next);
    parts.push(html("p", {}, link(`#/${run}/rollouts?${more}`, rows.length ? "More" : "Search on")));
  }
  return parts;
}

async function groupPage(run, query, place) {
  const group = await api(`api/runs/${run}/groups/${place}`);
  const components = [...new Set(group.members.flatMap((member) => Object.keys(member.reward_components)))];
  const members = Object.fromEntries(group.members.map((member) => [member.key, member]));
  const cards = group.side_by_side.map((key) => members[key]).map((member) => html("article", {},
    html("h3", {}, link(`#/${run}/rollout/${member.key}`, member.rollout_id)),
    html("ul", { class: "facts" }, ...facts(member).map(([name, value]) => html("li", {}, `${name} `, html("b", {}, value)))),
    html("pre", {}, short(member.last, 500))));
  const rewarded = group.members.filter((member) => member.reward !== null).length, failed = group.members.length - rewarded;
  const same = group.std === 0 && rewarded > 1;
  return [
    html("h1", {}, `Group ${group.group_id}`),
    html("p", {}, `Mean reward ${number(group.mean)}, standard deviation ${number(group.std)}.`,
      failed ? ` ${number(failed)} of ${number(group.members.length)} have no reward, and are in neither.` : "",
      same ? " All rewards are equal: an algorithm that compares a group learns nothing from it." : ""),
    group.prompt ? html("details", { open: true }, html("summary", {}, `What each was asked (example ${group.sample_id})`), html("pre", {}, group.prompt)) : null,
    table(["Rollout", "Reward", ...components.map((name) => named(name, group.weights)), "Advantage", "Outcome", "Status"], group.members.map((member) => [
      link(`#/${run}/rollout/${member.key}`, member.rollout_id), number(member.reward),
      ...components.map((name) => number(member.reward_components[name])), member.advantage ? number(member.advantage.mean) : "–",
      member.outcome || "–", member.status]), { below: group.members.map((member) => member.error) }),
    html("h2", {}, "Side by side, the most unusual reward first"),
    html("div", { class: "side", tabindex: "0" }, ...cards),
  ];
}

// A reward function with its share of the reward, if the config says so: "accuracy (3 of 4)".
function named(name, weights) {
  return name in weights ? `${name} (${weightOf(name, weights)})` : name;
}

function weightOf(name, weights) {
  const total = Object.values(weights).reduce((a, b) => a + b, 0);
  return name in weights ? `${number(weights[name])} of ${number(total)}` : "–";
}

function facts(rollout) {
  const found = [["reward", number(rollout.reward)], ["status", rollout.status], ["outcome", rollout.outcome || "not counted"],
    ["trained in step", number(rollout.step)], ["started at version", number(rollout.version)], ["tokens", number(rollout.tokens)]];
  if (rollout.advantage) {
    const { min, max, mean } = rollout.advantage;
    found.push(["advantage", min === max ? number(mean) : `${number(min)} to ${number(max)}`]);
  }
  return found;
}

async function rolloutPage(run, query, key) {
  const whole = query.get("whole") ? "?whole=true" : "";
  const rollout = await api(`api/runs/${run}/rollouts/${key}${whole}`);
  const parts = [
    html("h1", {}, rollout.rollout_id),
    html("p", {}, link(`#/${run}/group/${rollout.place}`, `group ${rollout.group_id}`), " · ",
      link(`#/${run}/rollouts?${new URLSearchParams({ task: rollout.task })}`, `task ${rollout.task}`), " · ",
      html("button", { type: "button", onclick: (event) => copyRecord(run, key, event.target) }, "Copy as JSON"), " ",
      html("button", { type: "button", onclick: (event) => copied(testOf(rollout), event.target) }, "Copy as a test")),
    html("ul", { class: "facts" }, ...facts(rollout).map(([name, value]) => html("li", {}, `${name} `, html("b", {}, value)))),
    Object.keys(rollout.reward_components).length ? table(["Reward function", "Value", "Weight"], Object.entries(rollout.reward_components)
      .map(([name, value]) => [name, number(value), weightOf(name, rollout.weights)])) : null,
    Object.keys(rollout.reward_components).some((name) => !(name in rollout.weights))
      ? html("p", { class: "quiet" }, "A weight is shown where the config has it: not of a rubric's own register_funcs, nor of what only an env rewards.") : null,
    rollout.error ? html("p", { class: "error" }, rollout.error) : null,
    rollout.traceback ? html("details", { open: true }, html("summary", {}, "Traceback"), html("pre", {}, rollout.traceback)) : null,
    rollout.advantage_is ? html("p", { class: "warning" }, rollout.advantage_is) : null,
    rollout.left_out ? html("p", { class: "warning" }, `Not recorded: ${rollout.left_out}`) : null,
    rollout.example ? html("details", {}, html("summary", {}, `Example ${rollout.example.sample_id}`), html("pre", {}, rollout.example.env_input || "")) : null,
    rollout.calls.length ? html("details", { open: "" }, html("summary", {}, "Calls, each at its time since the agent began"), html("pre", {}, rollout.calls.join("\n"))) : null,
    html("h2", {}, rollout.calls.length ? "Conversations" : "Conversation"),
  ];
  rollout.turns.forEach((turn, i) => {
    if (turn.rewritten && i) parts.push(html("p", { class: rollout.calls.length ? "quiet" : "warning" }, rollout.calls.length ? `Turn ${i + 1} begins a conversation or goes on from an earlier turn.` : "The conversation was rewritten here: a new training sample."));
    if (turn.tools && turn.tools.length) parts.push(html("details", {}, html("summary", {}, `${turn.tools.length} tools`), html("pre", {}, JSON.stringify(turn.tools, null, 2))));
    parts.push(...turn.messages.map((one) => message(one)));
    const note = `${number(turn.tokens)} tokens, version ${turn.versions.join(", ")}, ${turn.generate_s.toFixed(2)} s, ended by ${turn.finish_reason}`;
    parts.push(message(turn.reply, note));
    const own = Object.entries(turn.reward_components);
    if (own.length) parts.push(html("p", { class: "quiet" }, `Env rewards: ${own.map(([name, value]) => `${name} ${number(value)}`).join(", ")}`));
  });
  parts.push(...rollout.last_messages.map((one) => message(one)));
  rollout.samples.forEach((sample, i) => {
    const place = html("div", {});
    parts.push(html("h2", {}, `Training sample ${i + 1}: ${number(sample.trained)} of ${number(sample.tokens)} tokens have a weight in the loss`),
      html("button", { type: "button", onclick: (event) => { event.target.remove(); showTokens(place, run, key, i, 0); } }, "Show the tokens"), place);
  });
  return parts;
}

function message(one, note) {
  const parts = [html("h3", {}, one.role + (note ? ` · ${note}` : ""))];
  if (one.thought) parts.push(html("details", { open: true }, html("summary", {}, "Thought"), html("div", { class: "text quiet" }, one.thought)));
  if (one.text) {
    const body = html("div", { class: "text" }, one.text);
    parts.push(one.role === "system" ? html("details", {}, html("summary", {}, "Shown once, for all turns"), body) : body);
  }
  for (const call of one.calls) parts.push(html("details", {}, html("summary", {}, `Calls ${call.name}`), html("pre", {}, call.arguments || "")));
  return html("section", { class: `message ${one.role.replace(/\W/g, "")}` }, ...parts);
}

const COLOURED_BY = {
  generator_logprobs: ["log-probability", "less"],
  trainer_logprobs: ["trainer's log-probability", "less"], ratio: ["ratio of trainer to generator", "ratio"], policy_versions: ["version", "range"], loss_mask: ["sampled", "range"],
  role_ids: ["role", "names"], advantages: ["advantage", "signed"], rl_weights: ["rl weight", "signed"],
  ce_weights: ["ce weight", "signed"], ref_kl_weights: ["ref_kl weight", "signed"], ref_logprobs: ["reference's log-probability", "less"],
};
const ROLE_COLOURS = { system: "120,120,120", developer: "120,120,120", user: "0,158,115", assistant: "0,114,178", tool: "230,159,0" };

async function showTokens(place, run, key, sample, offset) {
  const page = await api(`api/runs/${run}/rollouts/${key}/tokens?sample=${sample}&offset=${offset}`);
  const streams = Object.keys(page.streams).filter((name) => name in COLOURED_BY);
  const by = html("select", {}, ...streams.map((name) => html("option", { value: name }, COLOURED_BY[name][0])));
  const key_ = html("span", { class: "quiet" });
  const detail = html("div", { class: "tokendetail", role: "status" }, "Point at a token, or move with the arrow keys.");
  const spans = page.ids.map((id, i) => {
    const text = page.texts ? page.texts[i] : ` ${id}`;
    const seen = text === "" || text.includes("\ufffd") ? `⟨${id}⟩` : text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
    return html("span", { tabindex: i ? "-1" : "0", class: page.special[i] ? "special" : null, "data-i": i }, seen);
  });
  const show = (i) => {
    const values = Object.entries(page.streams).map(([name, entries]) => `${name} ${typeof entries[i] === "string" || typeof entries[i] === "boolean" ? entries[i] : number(entries[i])}`);
    detail.textContent = `token ${offset + i}: id ${page.ids[i]} · ${values.join(" · ")}`;
  };
  const box = html("div", {
    class: "tokens",
    onmouseover: (event) => { if (event.target.dataset.i) show(Number(event.target.dataset.i)); },
    onfocusin: (event) => { if (event.target.dataset.i) show(Number(event.target.dataset.i)); },
    onkeydown: (event) => {
      const next = Number(event.target.dataset.i) + ({ ArrowRight: 1, ArrowLeft: -1 }[event.key] || 0);
      if (event.key.startsWith("Arrow") && spans[next]) { event.preventDefault(); spans[next].focus(); }
    },
  }, ...spans);
  const paint = () => { key_.textContent = ` ${coloured(spans, page.streams[by.value] || [], COLOURED_BY[by.value] || ["", "range"])}`; };
  by.addEventListener("change", paint);
  if (streams.includes("advantages")) by.value = "advantages";
  paint();
  const more = page.offset + page.ids.length < page.length
    ? html("button", { type: "button", onclick: (event) => { event.target.remove(); showTokens(place, run, key, sample, page.offset + page.ids.length); } }, "Further tokens") : null;
  place.append(html("p", {}, html("label", {}, "Coloured by ", by), key_), box, detail, ...(more ? [more] : []));
}

// Colours each span; returns what the colours mean.
function coloured(spans, values, [name, how]) {
  const known = values.filter((value) => typeof value === "number");
  const low = Math.min(...known), high = Math.max(...known), size = Math.max(Math.abs(low), Math.abs(high)) || 1;
  spans.forEach((span, i) => {
    const value = values[i];
    let colour = "";
    if (how === "names") colour = value ? `rgba(${ROLE_COLOURS[value]},.4)` : "";
    else if (value === true) colour = "rgba(0,114,178,.4)";
    else if (typeof value !== "number" || (value === 0 && how !== "ratio")) colour = "";
    else if (how === "signed") colour = value > 0 ? `rgba(0,114,178,${(0.15 + 0.5 * value / size).toFixed(2)})` : `rgba(213,94,0,${(0.15 - 0.5 * value / size).toFixed(2)})`;
    else if (how === "ratio") { // twice is as far from 1 as half; what rounding explains is not seen
      const far = Math.log2(value);
      colour = `rgba(${far > 0 ? "0,114,178" : "213,94,0"},${Math.min(0.65, 0.65 * Math.abs(far)).toFixed(2)})`;
    }
    else if (how === "less") colour = `rgba(213,94,0,${Math.min(0.7, -value / 6).toFixed(2)})`;
    else if (value >= 0) colour = `rgba(0,114,178,${(0.15 + 0.45 * (high > low ? (value - low) / (high - low) : 1)).toFixed(2)})`;
    span.style.background = colour;
  });
  if (how === "names") return "green user, blue assistant, orange tool, grey system";
  if (!known.length) return "blue: yes";
  if (how === "ratio") return `${name} ${number(low)} to ${number(high)}; blue above 1, orange below, full at twice or half`;
  return `${name} ${number(low)} to ${number(high)}${how === "signed" ? "; blue above 0, orange below" : how === "less" ? "; the more orange, the less likely" : ""}`;
}

async function copyRecord(run, key, button) {
  copied(JSON.stringify(await api(`api/runs/${run}/rollouts/${key}/raw`)), button);
}

function testOf(rollout) {
  const replies = rollout.turns.map((turn) => JSON.stringify(turn.reply.text || ""));
  return [
    "# Fill in CONFIG, the task's config, and the folder of its tokenizer; env_input is the example's.",
    `async def test_${rollout.task.replace(/\W/g, "_")}_rewards_this_rollout():`,
    '    task = CONFIG.build(name="task", renderer=build_renderer(RendererConfig(), TOKENIZER))',
    `    sample = DataSample(sample_id="s", env_input=${JSON.stringify(rollout.example ? rollout.example.env_input : null)})`,
    `    policy = ScriptedPolicy(TOKENIZER, [${replies.join(", ")}])`,
    '    group = await task.run_group(sample, policy, group_id="g", seed=0, group_size=1)',
    "    await task.score_rewards(group)",
    `    assert group.rollouts[0].status == ${JSON.stringify(rollout.status)}`,
    `    assert group.rollouts[0].reward == ${rollout.reward === null ? "None" : rollout.reward}`, "",
  ].join("\n");
}

async function copied(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.after(html("textarea", { rows: 8, cols: 60, readonly: true }, text));
  }
  setTimeout(() => { button.textContent = before; }, 2000);
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, most)}…` : text;
}
