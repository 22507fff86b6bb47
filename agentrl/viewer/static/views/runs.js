// List of the folder's runs; two or more are chosen for comparison.
import { html, useEffect, useState } from "../html.js";
import { useData } from "../api.js";
import { Sparkline } from "../chart.js";
import { brief, moment, number, plural, seconds } from "../format.js";
import { useKeys, useRowKeys } from "../keys.js";
import { Empty, StatusBadge } from "../legend.js";
import { address, go, toRun } from "../router.js";

const KINDS = { evaluation: "evaluation", foreign: "other format" };
const MEASURES = { loss: "loss" }; // of runs on given data; the others show their reward

function Row({ row, chosen, choose }) {
  const reward = row.reward || {};
  return html`<tr data-run=${row.id}><td><input type="checkbox" aria-label=${`compare ${row.name}`} checked=${chosen} onChange=${choose} /></td>
    <td><a href=${toRun(row.id)}>${row.name}</a>${KINDS[row.kind] && html` <span class="tag">${KINDS[row.kind]}</span>`}</td>
    <td><${StatusBadge} status=${row.status} title=${row.stop_reason} /></td>
    <td><${Sparkline} values=${row.sparkline || []} />${MEASURES[row.measure] && html` <span class="dim">${MEASURES[row.measure]}</span>`}</td>
    <td class="num">${number(reward.first, 3)}</td><td class="num">${number(reward.last, 3)}</td>
    <td class="num">${number(row.step)}${row.num_steps ? html`<span class="dim"> of ${row.num_steps}</span>` : ""}</td>
    <td class="num">${seconds(row.wall_s)}</td>
    <td class="cut mono" title=${row.command || row.agent}>${row.problem ? html`<span class="badge bad">${brief(row.problem, 120)}</span>` : row.command || row.agent || row.data || "–"}</td>
    <td>${(row.tags || []).map((tag) => html`<span class="tag" key=${tag}>${tag}</span>`)}</td>
    <td class="num dim">${moment(row.updated_s)}</td></tr>`;
}

function NoRuns({ folder }) {
  return html`<${Empty}><p>There is no run in <code>${folder}</code> yet.</p>
    <p>Train one with <code>agentrl train --agent envs/calculator.py</code>, or name the folder in which runs lie: <code>agentrl view FOLDER</code>.</p><//>`;
}

const holds = (row, words) => words.every((word) => `${row.name} ${row.command} ${row.agent} ${row.status} ${(row.tags || []).join(" ")}`.toLowerCase().includes(word));

export function RunsView() {
  const { data, error } = useData("api/runs", "runs");
  const [chosen, setChosen] = useState([]);
  const [filter, setFilter] = useState("");
  const compare = () => go(address(["compare"], { runs: chosen.join(",") }));
  useRowKeys("tr[data-run]");
  useKeys({ c: ["compare the chosen runs", () => chosen.length > 1 && compare()], x: ["choose the marked run", () => document.querySelector("tr.marked input")?.click()] });
  useEffect(() => {
    if (data && data.single && data.runs.length === 1 && !location.hash.slice(2)) location.replace(toRun(data.runs[0].id));
  }, [data]);
  if (error && !data) return html`<${Empty}>${error}<//>`;
  if (!data) return null;
  const rows = data.runs.filter((row) => holds(row, filter.toLowerCase().split(/\s+/).filter(Boolean)));
  const choose = (id) => setChosen(chosen.includes(id) ? chosen.filter((other) => other !== id) : [...chosen, id]);
  return html`<h1>Runs <span class="dim">in ${data.folder}</span></h1>
    <div class="tools"><input type="search" class="wide" placeholder="Filter by name, command, tag  ( / )" aria-label="Filter runs" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <button type="button" id="compare" disabled=${chosen.length < 2} onClick=${compare}>${chosen.length < 2 ? "Choose runs to compare" : `Compare ${plural(chosen.length, "run")}`}</button>
      <span class="dim">${plural(rows.length, "run")}</span></div>
    ${data.runs.length === 0 ? html`<${NoRuns} folder=${data.folder} />` : html`<div class="scroll" role="group" aria-label="table" tabindex="0"><table><thead><tr><th><span class="sr">compare</span></th><th>run</th><th>status</th><th>reward</th>
      <th class="num">first</th><th class="num">last</th><th class="num">steps</th><th class="num">time</th><th>command</th><th>tags</th><th class="num">changed</th></tr></thead>
      <tbody>${rows.map((row) => html`<${Row} key=${row.id} row=${row} chosen=${chosen.includes(row.id)} choose=${() => choose(row.id)} />`)}</tbody></table></div>`}`;
}
