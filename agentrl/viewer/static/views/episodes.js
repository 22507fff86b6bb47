// Recorded episodes: filtered, sorted, paged.
import { html } from "../html.js";
import { question, runPath, useData } from "../api.js";
import { plural } from "../format.js";
import { useRowKeys } from "../keys.js";
import { Empty } from "../legend.js";
import { setQuery } from "../router.js";
import { EpisodeTable, Pages } from "../rows.js";

const LIMIT = 50;
const NAMES = ["step", "group", "task", "status", "agent", "source", "min_reward", "max_reward", "text"];

// Episodes of evaluations are left out of a training run's list until they are asked for.
const TRAINING = "train";
const several = (info) => (info.sources || []).length > 1 && info.sources.includes(TRAINING);
const sourceOf = (info, query) => (query.source === "all" ? "" : query.source || (several(info) ? TRAINING : ""));

function Filters({ query, info, statuses }) {
  const set = (name) => (event) => setQuery({ [name]: event.target.value, offset: "" });
  const choice = (name, label, values) => values.length > 0 && html`<label>${label} <select aria-label=${label} value=${query[name] || ""} onChange=${set(name)}>
    <option value="">all</option>${values.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></label>`;
  const field = (name, label, type, size) => html`<label>${label} <input type=${type} aria-label=${label} size=${size} step="any" value=${query[name] || ""} onInput=${set(name)} /></label>`;
  return html`<div class="tools">${field("text", "text", "search", 16)}${choice("status", "status", Object.entries(statuses || {}).map(([name, count]) => [name, `${name} (${count})`]))}
    ${several(info) && html`<label>source <select aria-label="source" value=${query.source || TRAINING} onChange=${set("source")}>${[...info.sources, "all"].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>`}${choice("agent", "agent", (info.agents || []).filter(Boolean).map((name) => [name, name]))}
    ${field("step", "step", "number")}${field("min_reward", "reward from", "number")}${field("max_reward", "to", "number")}
    ${NAMES.some((name) => query[name]) && html`<button type="button" onClick=${() => setQuery(Object.fromEntries([...NAMES, "offset"].map((name) => [name, ""])))}>Show all</button>`}</div>`;
}

export function EpisodesView({ run, info, query }) {
  const offset = Number(query.offset || 0);
  const sort = query.sort || "-time";
  const asked = { ...Object.fromEntries(NAMES.map((name) => [name, query[name]])), source: sourceOf(info, query) };
  const { data, error } = useData(question(runPath(run, "episodes"), { ...asked, offset: offset || "", limit: LIMIT, sort: sort === "-time" ? "" : sort }), run);
  useRowKeys("tr[data-episode]");
  if (info.has && !info.has.trajectories) {
    return html`<${Empty}>This run recorded no episode. Train without <code>--record none</code>; <code>--record all</code> records every one, <code>--record sample</code> one of each group.<//>`;
  }
  if (error && !data) return html`<${Filters} query=${query} info=${info} /><${Empty}>${error}<//>`;
  return html`<h1>Recorded episodes <span class="dim">${data ? (data.chosen === data.of ? plural(data.of, "episode") : `${data.chosen} of ${data.of}`) : ""}</span></h1>
    <${Filters} query=${query} info=${info} statuses=${data && data.statuses} />
    ${data && (data.rows.length ? html`<${EpisodeTable} run=${run} rows=${data.rows} sort=${sort} onSort=${(next) => setQuery({ sort: next, offset: "" })} />
      <${Pages} offset=${offset} limit=${LIMIT} of=${data.chosen} onMove=${(next) => setQuery({ offset: next || "" })} />` : html`<${Empty}>${data.of ? "No episode meets these conditions." : "No episode is recorded yet."}<//>`)}`;
}
