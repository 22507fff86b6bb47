// Tasks: pass rate of each over training, the hardest, those that improved most; and one task with its groups.
import { html } from "../html.js";
import { question, runPath, useData } from "../api.js";
import { Chart, Sparkline } from "../chart.js";
import { lineColour } from "../colour.js";
import { number, percent, plural, signed, valueText } from "../format.js";
import { useRowKeys } from "../keys.js";
import { Empty, Facts } from "../legend.js";
import { address, go, setQuery, toStep } from "../router.js";
import { GroupTable, Pages, rangeOf } from "../rows.js";

const SORTS = [["hardest", "hardest"], ["easiest", "easiest"], ["improved", "most improved"], ["worsened", "most worsened"], ["episodes", "most episodes"], ["task", "by name"]];
const LIMIT = 100;

export function TasksView({ run, query }) {
  const offset = Number(query.offset || 0);
  const { data, error } = useData(question(runPath(run, "tasks"), { sort: query.sort === "hardest" ? "" : query.sort, text: query.text, offset: offset || "" }), run);
  useRowKeys("tr[data-task]");
  if (error && !data) return html`<${Empty}>${error}<//>`;
  if (!data) return null;
  return html`<h1>Tasks <span class="dim">${data.of}${data.source === "recorded" ? ", counted from recorded episodes only" : ""}</span></h1>
    <div class="tools"><input type="search" aria-label="Find a task" placeholder="Find a task" value=${query.text || ""} onInput=${(event) => setQuery({ text: event.target.value, offset: "" })} />
      <span role="group" aria-label="order">${SORTS.map(([name, text]) => html`<button type="button" key=${name} class=${(query.sort || "hardest") === name ? "on" : ""} onClick=${() => setQuery({ sort: name === "hardest" ? "" : name, offset: "" })}>${text}</button>`)}</span></div>
    ${data.rows.length === 0 ? html`<${Empty}>${data.of ? "No task's name contains this text." : "No group has ended yet."}<//>` : html`<div class="scroll" role="group" aria-label="table" tabindex="0"><table><thead><tr><th>task</th><th>pass rate over training</th><th class="num">pass</th><th class="num">at first</th><th class="num">at last</th>
      <th class="num">reward</th><th class="num">change of reward</th><th class="num">groups</th><th class="num">episodes</th><th class="num">filtered</th><th class="num">failures</th></tr></thead><tbody>${data.rows.map(
        (row) => html`<tr key=${row.task} data-task=${row.task}><td class="cut mono"><a href=${address(["run", run, "task", row.task])}>${row.task}</a></td>
          <td><${Sparkline} values=${row.curve.map((point) => point[2])} range=${[0, 1]} /></td><td class="num">${percent(row.pass)}</td><td class="num">${percent(row.pass_first)}</td><td class="num">${percent(row.pass_last)}</td>
          <td class="num">${number(row.reward, 3)}</td><td class="num">${signed(row.change)}</td><td class="num">${row.groups}</td><td class="num">${row.episodes}</td><td class="num">${row.filtered}</td><td class="num">${row.failures}</td></tr>`,
      )}</tbody></table></div><${Pages} offset=${offset} limit=${LIMIT} of=${data.chosen} onMove=${(next) => setQuery({ offset: next || "" })} />`}`;
}

export function TaskView({ run, name }) {
  const { data, error } = useData(runPath(run, "task", name), run);
  useRowKeys("tr[data-group]");
  if (error && !data) return html`<${Empty}>${error} <a href=${address(["run", run, "tasks"])}>All tasks</a><//>`;
  if (!data) return null;
  const info = data.info || {};
  const [low, high] = rangeOf(data.groups.flatMap((row) => row.rewards || []));
  const curve = (place, text, index) => ({ name: text, colour: lineColour(index), points: data.curve.map((point) => ({ x: point[0], y: point[place], step: point[0] })) });
  const pick = (_, point) => go(toStep(run, point.step));
  return html`<h1>Task <span class="mono">${name}</span></h1><${Facts} rows=${[
    ["pass rate", `${percent(data.pass)}, at first ${percent(data.pass_first)}, at last ${percent(data.pass_last)}`], ["reward", `${number(data.reward, 3)}, change ${signed(data.change)}`], ["played", `${plural(data.groups.length, "group")}, ${plural(data.episodes, "episode")}`],
    ["label", html`<span class="mono">${valueText(info.label)}</span>`], ["metadata", Object.keys(info.metadata || {}).length > 0 && valueText(info.metadata)],
  ]} />
    ${info.prompt && html`<div class="message given"><div class="role">prompt</div><pre class="text">${typeof info.prompt === "string" ? info.prompt : JSON.stringify(info.prompt, null, 1)}</pre></div>`}
    <div class="charts"><${Chart} title="reward" curves=${[curve(1, "reward", 0)]} onPick=${pick} /><${Chart} title="pass rate" curves=${[curve(2, "pass rate", 1)]} onPick=${pick} /></div>
    <h2>Groups</h2><${GroupTable} run=${run} rows=${data.groups} low=${low} high=${high} source=${data.source} />`;
}
