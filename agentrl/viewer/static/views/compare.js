// Two or more runs: their curves over one axis, and the settings in which they differ.
import { html } from "../html.js";
import { question, useData } from "../api.js";
import { Curves } from "../curves.js";
import { lineColour } from "../colour.js";
import { number, seconds, valueText } from "../format.js";
import { Empty, StatusBadge } from "../legend.js";
import { go, toRun, toStep } from "../router.js";

function Heads({ runs }) {
  return html`<div class="scroll" role="group" aria-label="table" tabindex="0"><table><thead><tr><th>run</th><th>status</th><th class="num">steps</th><th class="num">time</th><th class="num">first reward</th><th class="num">last</th><th class="num">best</th></tr></thead>
    <tbody>${runs.map((row, index) => html`<tr key=${row.id}><td><i class="swatch" style=${{ backgroundColor: lineColour(index) }}></i><a href=${toRun(row.id)}>${row.name}</a></td>
      <td><${StatusBadge} status=${row.status} /></td><td class="num">${number(row.step)}</td><td class="num">${seconds(row.wall_s)}</td>
      <td class="num">${number((row.reward || {}).first, 3)}</td><td class="num">${number((row.reward || {}).last, 3)}</td><td class="num">${number((row.reward || {}).best, 3)}</td></tr>`)}</tbody></table></div>`;
}

function Differences({ settings, runs }) {
  if (!settings.length) return html`<${Empty}>The settings of these runs are the same, or were not recorded.<//>`;
  return html`<div class="scroll" role="group" aria-label="table" tabindex="0"><table class="differences"><thead><tr><th>setting</th>${runs.map((row) => html`<th key=${row.id}>${row.name}</th>`)}</tr></thead>
    <tbody>${settings.map((setting) => html`<tr key=${setting.name}><td class="mono">${setting.flag || setting.name}</td>
      ${setting.values.map((value, index) => html`<td key=${index} class="mono wrap">${valueText(value)}</td>`)}</tr>`)}</tbody></table></div>`;
}

export function CompareView({ query }) {
  const ids = (query.runs || "").split(",").filter(Boolean);
  const { data, error } = useData(ids.length ? question("api/compare", { runs: ids.join(",") }) : null, "runs");
  if (!ids.length) return html`<${Empty}>No run is chosen. <a href="#/">Choose two or more in the list of runs.</a><//>`;
  if (error && !data) return html`<${Empty}>${error}<//>`;
  if (!data) return null;
  return html`<h1>Comparison of ${ids.length} runs</h1><${Heads} runs=${data.runs} />
    <h2>Differences of configuration</h2><${Differences} settings=${data.settings.filter((setting) => setting.differs !== false)} runs=${data.runs} />
    <h2>Curves</h2><${Curves} runs=${ids} version=${data.runs.map((row) => row.step).join(",")} query=${query} onPick=${(run, metric, step) => go(toStep(run, step, { metric }))} />`;
}
