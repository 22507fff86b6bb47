// The frame around the views: where the reader is, the run's sections, search, light and dark, keys.
import { html, render, useEffect, useErrorBoundary, useLayoutEffect, useRef, useState } from "./html.js";
import { runPath, saved, useData, useGrowth } from "./api.js";
import { address, go, toEpisode, toGroup, toRun, toStep, useRoute } from "./router.js";
import { helpRows, useKeys } from "./keys.js";
import { isDark, setTheme, useDark } from "./theme.js";
import { Empty, StatusBadge } from "./legend.js";
import { RunsView } from "./views/runs.js";
import { CompareView } from "./views/compare.js";
import { RunView } from "./views/run.js";
import { SettingsView } from "./views/settings.js";
import { StepsView } from "./views/steps.js";
import { StepView } from "./views/step.js";
import { EpisodesView } from "./views/episodes.js";
import { EpisodeView } from "./views/episode.js";
import { GroupView } from "./views/group.js";
import { TaskView, TasksView } from "./views/tasks.js";
import { EvaluationsView } from "./views/evaluations.js";
import { EvaluatedView } from "./views/evaluated.js";
import { SampleView, SamplesView } from "./views/samples.js";
import { SearchView } from "./views/search.js";

const VIEWS = {
  "": RunView, settings: SettingsView, steps: StepsView, step: StepView, episodes: EpisodesView, episode: EpisodeView, group: GroupView,
  tasks: TasksView, task: TaskView, evaluations: EvaluationsView, evaluated: EvaluatedView, search: SearchView, samples: SamplesView, sample: SampleView,
};
const SECTIONS = [["", "Curves"], ["steps", "Steps"], ["episodes", "Episodes"], ["tasks", "Tasks"], ["evaluations", "Evaluations"], ["settings", "Settings"]];
const TUNED = [["", "Curves"], ["samples", "Rows"], ["settings", "Settings"]]; // of a run on given data
const PART_OF = { sample: "samples", evaluated: "evaluations", step: "steps", episode: "episodes", group: "steps", task: "tasks" };

function Path({ run, section, name }) {
  const words = { step: `step ${name}`, episode: `episode ${name}`, group: `group ${name}`, task: `task ${name}`, evaluated: `evaluated ${name}`, sample: `row ${Number(name) + 1}` };
  const links = { step: toStep, episode: toEpisode, group: toGroup };
  return html`<span class="path"><a class="brand" href="#/">agentrl</a>${run && html`<a href=${toRun(run)}>${run}</a>`}
    ${words[section] && html`<a href=${links[section] ? links[section](run, name) : address(["run", run, section, name])}>${words[section]}</a>`}</span>`;
}

function Top({ run, info, section, name, growth, query, askHelp }) {
  const dark = useDark();
  const tuned = info && info.kind === "tune";
  const { changes, lost } = growth;
  const search = (event) => {
    event.preventDefault();
    const text = event.target.elements.text.value.trim();
    if (text) go(address(["run", run, "search"], { text }));
  };
  return html`<header class="top"><${Path} run=${run} section=${section} name=${name} />
    ${run && changes && html`<${StatusBadge} status=${changes.status} />`}
    ${run && html`<nav aria-label="sections of the run">${(tuned ? TUNED : SECTIONS).map(
      ([part, text]) => html`<a key=${part} class=${(PART_OF[section] || section) === part ? "here" : ""} href=${address(["run", run, part].filter(Boolean))}>${text}</a>`,
    )}</nav>`}
    <span class="space"></span>
    ${run && changes && changes.status === "running" && html`<span class="live" id="live">step ${changes.steps}</span>`}
    ${run && changes && changes.index && !changes.index.done && html`<span class="dim">reading episodes: ${Math.floor((100 * changes.index.bytes) / Math.max(1, changes.index.of))}%</span>`}
    ${lost && html`<span class="badge bad">the server does not answer</span>`}
    ${saved && html`<span class="badge">saved page</span>`}
    ${run && !saved && !tuned && html`<form onSubmit=${search}><input type="search" name="text" id="search" placeholder="Search the episodes  ( / )" aria-label="Search the episodes" defaultValue=${section === "search" ? query.text : ""} /></form>`}
    <button type="button" title="light or dark (t)" aria-label="light or dark" onClick=${() => setTheme(dark ? "light" : "dark")}>${dark ? "light" : "dark"}</button>
    <button type="button" title="keys (?)" aria-label="keys" onClick=${askHelp}>?</button></header>`;
}

// A real dialog of the browser: it holds the focus, makes the rest inert, and gives the focus back when it is closed.
function Help({ close }) {
  const place = useRef(null);
  useKeys({ Escape: ["close", close] });
  useLayoutEffect(() => {
    const dialog = place.current;
    dialog.showModal();
    return () => dialog.close(); // before it is taken away, so that the browser gives the focus back
  }, []);
  return html`<dialog class="dialog" ref=${place} aria-labelledby="keys-title" onClose=${close} onClick=${(event) => event.target === place.current && close()}><div><p class="tools"><h2 id="keys-title">Keys</h2><span class="space"></span><button type="button" onClick=${close}>close</button></p><table><tbody>${helpRows().map(
    ([key, text]) => html`<tr key=${key}><td><kbd>${key}</kbd></td><td>${text}</td></tr>`,
  )}</tbody></table></div></dialog>`;
}

// A view that fails says why, and the rest of the page goes on.
function Guarded({ children }) {
  const [error, reset] = useErrorBoundary();
  useEffect(() => {
    addEventListener("hashchange", reset);
    return () => removeEventListener("hashchange", reset);
  }, []);
  return error ? html`<${Empty}>This view cannot be shown: ${String(error.message || error)}. <button type="button" onClick=${reset}>Try again</button><//>` : children;
}

const NotFound = ({ children }) => html`<h1>Not found</h1><${Empty}>${children}<//>`;

function RunPage({ run, answer, section, name, query }) {
  const { data, error } = answer;
  const View = VIEWS[section];
  if (error && !data) return html`<${NotFound}>${error} <a href="#/">All runs</a><//>`;
  if (!data) return null;
  if (!View) return html`<${NotFound}>A run has no page “${section}”. <a href=${toRun(run)}>The run's own page</a><//>`;
  return html`<${View} run=${run} info=${data} name=${name} query=${query} key=${`${run}/${section}/${name}`} />`;
}

function App() {
  const { parts, query } = useRoute();
  const [help, setHelp] = useState(false);
  const [kind, run = "", section = "", name = ""] = parts;
  const inRun = kind === "run" ? run : "";
  const growth = useGrowth(inRun);
  const answer = useData(inRun ? runPath(inRun) : null, inRun);
  useKeys({
    "?": ["show the keys", () => setHelp(!help)],
    "/": ["search", () => document.querySelector("#search, input[type=search]")?.focus()],
    t: ["light or dark", () => setTheme(isDark() ? "light" : "dark")],
    u: ["one level up", () => go(inRun && section ? toRun(inRun) : "#/")],
  });
  useEffect(() => {
    document.title = [name && `${section} ${name}`, inRun, "agentrl"].filter(Boolean).join(" · ");
  });
  const pages = { compare: CompareView, "": RunsView };
  const Page = pages[kind || ""];
  const view = inRun
    ? html`<${RunPage} run=${inRun} answer=${answer} section=${section} name=${name} query=${query} />`
    : Page ? html`<${Page} query=${query} />` : html`<${NotFound}>There is no page at <code>${location.hash}</code>. <a href="#/">All runs</a><//>`;
  return html`<${Top} run=${inRun} info=${answer.data} section=${section} name=${name} growth=${growth} query=${query} askHelp=${() => setHelp(true)} />
    <main class="page"><${Guarded}>${view}<//></main>${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

const { start } = document.documentElement.dataset;
if (start && location.hash.length < 3) history.replaceState(null, "", start);
const place = document.getElementById("page");
place.replaceChildren();
render(html`<${App} />`, place);
