"use strict";
// Which page is shown, and when it is shown again. The address is #/RUN/PAGE[/WHICH]?FILTERS.

const PAGES = {
  overview: ["Overview", overviewPage, true], ledger: ["Ledger", ledgerPage, true], rollouts: ["Rollouts", rolloutsPage, false],
  evaluations: ["Evaluations", evaluationsPage, true], timeline: ["Timeline", timelinePage, true], runs: ["Runs and config", runsPage, true],
  group: [null, groupPage, false], rollout: [null, rolloutPage, false],
};
const AGAIN_MS = 5000;
const exported = document.getElementById("data");
const held = exported ? JSON.parse(exported.textContent) : null;
let shown = "";
let lost = false; // the server did not answer the last time

// A JSON answer of the server; of an exported file, the one that it holds.
async function api(path) {
  if (held) {
    if (Object.hasOwn(held, path)) return held[path];
    throw new Error("this is not in the exported file; open the report of the run itself");
  }
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).slice(0, 300)}`);
  return answer.json();
}

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [run, page, which] = path.split("/");
  return { run: Number(run) || 0, page: Object.hasOwn(PAGES, page) ? page : "overview", which, query: new URLSearchParams(query || "") };
}

async function show({ again = false } = {}) {
  const at = location.hash, { run, page, which, query } = route();
  const main = document.getElementById("main");
  if (!again) main.setAttribute("aria-busy", "true");
  let parts;
  try {
    parts = await PAGES[page][1](run, query, which);
    if (page === "overview" || !again || lost) await head(run, page);
    lost = false;
  } catch (error) {
    parts = [html("h1", {}, "This page can't be shown"), html("p", { class: "error" }, error.message)];
    if (again) { // what is shown stays, and says that it is old
      lost = true;
      Object.assign(document.getElementById("state"), { textContent: "not updated: rl-report does not answer", className: "error" });
      return;
    }
  }
  if (at !== location.hash) return; // another page was asked for meanwhile
  const focused = document.activeElement, isInside = focused !== main && main.contains(focused);
  if (again && (isInside || main.querySelector("figure:hover"))) return; // what somebody reads stays
  main.replaceChildren(...parts.filter((part) => part));
  main.removeAttribute("aria-busy");
  if (shown && shown !== at && !again) { // a choice on the page leaves the reader where it is
    const isSamePage = shown.split("?")[0] === at.split("?")[0];
    const control = isSamePage && isInside && focused.name ? main.querySelector(`[name="${CSS.escape(focused.name)}"]`) : null;
    (control || main).focus({ preventScroll: true });
    if (!isSamePage || query.has("offset")) scrollTo(0, 0);
  }
  shown = at || "#";
  main.dataset.page = page;
}

async function head(run, page) {
  const { runs } = await api("api/runs");
  const choice = document.getElementById("run");
  choice.replaceChildren(...runs.map((one) => html("option", { value: one.number, selected: one.number === run }, `${one.number}: ${one.name}`)));
  choice.onchange = () => { location.hash = `#/${choice.value}/${page in { group: 1, rollout: 1 } ? "rollouts" : page}`; };
  document.getElementById("pages").replaceChildren(...Object.entries(PAGES).filter(([, [name]]) => name)
    .map(([key, [name]]) => html("a", { href: `#/${run}/${key}`, "aria-current": key === page ? "page" : null }, name)));
  const state = document.getElementById("state");
  state.textContent = runs[run] ? runs[run].state.state : "";
  state.className = runs[run] ? STATES[runs[run].state.state] : "";
  document.title = `${runs[run] ? runs[run].name : "Run"} · ${PAGES[page][0] || page}`;
}

window.addEventListener("hashchange", () => show());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
show();
if (!held) setInterval(() => { if (!document.hidden && PAGES[route().page][2]) show({ again: true }); }, AGAIN_MS);
