// One task in two evaluations: what the model wrote before and after, side by side.
import { html, useMemo } from "../html.js";
import { question, runPath, useData } from "../api.js";
import { known, number, plural, signed, valueText } from "../format.js";
import { useKeys } from "../keys.js";
import { Empty, Facts } from "../legend.js";
import { address, go, setQuery, toGroup } from "../router.js";
import { useDark } from "../theme.js";
import { FIGURES, TokenLegend, coloursOf, painter } from "../tokens.js";
import { LongText } from "../turn.js";
import { Member, asEpisode } from "./group.js";

function Side({ run, title, source, value, data, paint }) {
  return html`<section class="side-of"><h2>${title} <span class="dim">reward ${number(value && value.reward, 3)}${data ? `, ${plural(data.members.length, "recorded episode")}` : ""}</span>
      ${data && html` <a href=${toGroup(run, data.group, { source })}>its group</a>`}</h2>
    ${data ? html`<div class="members">${data.members.map((member) => html`<${Member} key=${member.trajectory} run=${run} member=${member} difference=${null} paint=${paint} whole=${true} />`)}</div>` : html`<${Empty}>No episode of this task is recorded in this evaluation.<//>`}</section>`;
}

export function EvaluatedView({ run, name, query }) {
  const { data, error } = useData(question(runPath(run, "evaluations")), run);
  const task = data && data.by_task.find((row) => row.task === name);
  const recorded = task ? task.values.filter((value) => known(value.group)) : [];
  const at = (wanted, otherwise) => recorded.find((value) => String(value.step) === wanted) || otherwise;
  const [before, after] = [at(query.before, recorded[0]), at(query.after, recorded.at(-1))];
  const row = (value) => data.rows.find((one) => one.step === value.step);
  const where = (value) => value && question(runPath(run, "group", value.group), { source: row(value).source });
  const [left, right] = [useData(where(before), run).data, useData(where(after), run).data];
  const dark = useDark();
  const like = useMemo(() => asEpisode([...(left ? left.members : []), ...(right ? right.members : [])]), [left, right]);
  const colour = query.colour || "none";
  const paint = useMemo(() => painter(like, colour, dark), [like, colour, dark]);
  const names = data ? data.by_task.map((one) => one.task) : [];
  const move = (by) => names[names.indexOf(name) + by] !== undefined && go(address(["run", run, "evaluated", names[names.indexOf(name) + by]], query));
  useKeys({ n: ["next task", () => move(1)], p: ["task before", () => move(-1)] });
  if (error && !data) return html`<${Empty}>${error}<//>`;
  if (!data) return null;
  if (!before) return html`<h1>Task <span class="mono">${name}</span></h1><${Empty}>No episode of this task is recorded in an evaluation. <code>--record sample</code> records one of each. <a href=${address(["run", run, "evaluations"])}>All evaluations</a><//>`;
  const info = ((right || left || {}).task_info) || {};
  const prompt = typeof info.prompt === "string" ? info.prompt : (info.prompt || []).map((message) => `${message.role}: ${valueText(message.content)}`).join("\n");
  const choice = (label, value) => html`<label>${label} <select aria-label=${label} value=${value.step} onChange=${(event) => setQuery({ [label]: event.target.value })}>${recorded.map((one) => html`<option key=${one.step} value=${one.step}>${row(one).label}</option>`)}</select></label>`;
  const both = before !== after;
  return html`<h1>${recorded.length > 1 ? "Before and after" : "Evaluated"}: <span class="mono">${name}</span></h1>
    <${Facts} rows=${[["label", html`<span class="mono">${valueText(info.label)}</span>`], ["change of reward", both && known(before.reward) && known(after.reward) && signed(after.reward - before.reward)]]} />
    ${prompt && html`<div class="message given"><div class="role">task</div><${LongText} text=${prompt} find="" /></div>`}
    <div class="tools">${recorded.length > 1 && html`${choice("before", before)}${choice("after", after)}`}
      <label>colour by <select aria-label="colour by" value=${colour} onChange=${(event) => setQuery({ colour: event.target.value === "none" ? "" : event.target.value })}><option value="none">nothing</option>
        ${coloursOf(like).map((one) => html`<option key=${one} value=${one}>${one === "mask" ? "mask" : FIGURES[one].text}</option>`)}</select></label><${TokenLegend} episode=${like} name=${colour} /></div>
    <div class="pair"><${Side} run=${run} title=${row(before).label} source=${row(before).source} value=${before} data=${left} paint=${paint} />${both && html`<${Side} run=${run} title=${row(after).label} source=${row(after).source} value=${after} data=${right} paint=${paint} />`}</div>`;
}
