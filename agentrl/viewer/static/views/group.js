// A group: its members side by side, read from the first token in which they differ.
import { html, useMemo } from "../html.js";
import { question, runPath, useData } from "../api.js";
import { known, number, plural, seconds, valueText } from "../format.js";
import { Empty, Facts, StatusBadge } from "../legend.js";
import { address, go, setQuery, toEpisode, toGroup, toStep } from "../router.js";
import { useKeys } from "../keys.js";
import { useDark } from "../theme.js";
import { FIGURES, TokenLegend, coloursOf, painter } from "../tokens.js";
import { Given, LongText, Tokens } from "../turn.js";

// What the colours of tokens need to know of the whole group, in the form of an episode.
export function asEpisode(members) {
  const turns = members.flatMap((member) => member.turns);
  const [fields, ranges, masks] = [new Set(), {}, {}];
  for (const turn of turns) {
    for (const name of Object.keys(FIGURES)) {
      const values = [turn.tokens[name]].flat().filter(known);
      if (!values.length) continue;
      fields.add(name);
      const [low, high] = ranges[name] || [Infinity, -Infinity];
      ranges[name] = [values.reduce((one, other) => Math.min(one, other), low), values.reduce((one, other) => Math.max(one, other), high)];
    }
    for (const mask of [turn.tokens.mask].flat().filter(Boolean)) masks[mask] = mask;
  }
  return { fields: [...fields], ranges, masks };
}

export function Member({ run, member, difference, paint, whole }) {
  const from = difference && !whole ? difference.turn : 0;
  const skipped = member.turns.filter((turn, index) => index < from).length;
  return html`<article class="member" data-member=${member.episode}><header><a href=${toEpisode(run, member.episode)}>${member.trajectory}</a>${member.agent && html`<span class="tag">${member.agent}</span>`}<${StatusBadge} status=${member.status} />
      <span>reward <b>${number(member.reward, 3)}</b></span>${known(member.score) && html`<span class="dim">score ${number(member.score, 3)}</span>`}${known(member.advantage) && html`<span class="dim">advantage ${number(member.advantage, 3)}</span>`}</header>
    ${member.error && html`<pre class="note">${member.error.slice(0, 400)}</pre>`}
    ${member.forked_from && html`<p class="dim">forked from <a href=${toEpisode(run, member.forked_from)}>${member.forked_from}</a> after ${plural(member.forked_turns, "turn")}</p>`}
    ${!member.recorded && html`<p class="dim">not recorded</p>`}
    ${skipped > 0 && html`<p class="dim">${plural(skipped, "turn")} the same for all</p>`}
    ${member.turns.map((turn, index) => index >= from && html`<div key=${index}><p class="dim">turn ${index + 1}${index > 0 ? "" : " (the prompt is the task's)"}</p>
      ${index > 0 && html`<${Given} turn=${turn} cells=${false} find="" />`}
      <div class=${difference && index === difference.turn ? "message differs" : "message"}><${Tokens} turn=${turn} paint=${paint} cells=${false} chosen=${-1} find="" from=${difference && index === difference.turn && !whole ? difference.token : 0} /></div>
      ${known(turn.reward) && html`<p class="dim">reward ${number(turn.reward)}</p>`}</div>`)}</article>`;
}

export function GroupView({ run, name, query }) {
  const { data, error } = useData(question(runPath(run, "group", name), { attempt: query.attempt, source: query.source }), run);
  const dark = useDark();
  const like = useMemo(() => (data ? asEpisode(data.members) : { fields: [], ranges: {}, masks: {} }), [data]);
  const colour = query.colour || "none";
  const paint = useMemo(() => painter(like, colour, dark), [like, colour, dark]);
  useKeys({
    n: ["next group", () => go(toGroup(run, Number(name) + 1, { source: query.source }))], p: ["group before", () => Number(name) > 0 && go(toGroup(run, Number(name) - 1, { source: query.source }))],
  });
  if (error && !data) return html`<${Empty}>${error}<//>`;
  if (!data) return null;
  const recorded = data.members.filter((member) => member.recorded);
  const whole = query.whole === "1";
  const first = data.first_difference;
  const task = data.task_info || {};
  const prompt = typeof task.prompt === "string" ? task.prompt : (task.prompt || []).map((message) => `${message.role}: ${valueText(message.content)}`).join("\n");
  return html`<h1>Group ${data.group} <${StatusBadge} status=${data.verdict === "kept" && data.step ? "trained" : data.verdict || "not recorded"} />${data.flat && html` <span class="badge warn">flat: every member earned the same</span>`}</h1>
    <${Facts} rows=${[
      ["task", html`<a class="mono" href=${address(["run", run, "task", data.task])}>${data.task}</a>`], ["label", html`<span class="mono">${valueText(task.label)}</span>`], ["step", data.step && html`<a href=${toStep(run, data.step)}>${data.step}</a>`], ["reason", data.reason],
      ["rewards", `mean ${number(data.reward_mean, 3)}, spread ${number(data.reward_std, 3)}`], ["staleness", number(data.staleness)], ["time", seconds(data.seconds)], ["worker", data.worker],
    ]} />
    ${prompt && html`<div class="message given"><div class="role">task</div><${LongText} text=${prompt} find="" /></div>`}
    <div class="tools"><label>colour by <select aria-label="colour by" value=${colour} onChange=${(event) => setQuery({ colour: event.target.value === "none" ? "" : event.target.value })}><option value="none">nothing</option>
      ${coloursOf(like).map((one) => html`<option key=${one} value=${one}>${one === "mask" ? "mask" : FIGURES[one].text}</option>`)}</select></label>
      <label><input type="checkbox" checked=${whole} onChange=${(event) => setQuery({ whole: event.target.checked ? "1" : "" })} /> whole episodes</label>
      <span class="dim" id="difference">${first ? `The members differ from turn ${first.turn + 1}, token ${first.token + 1} on; what is common is pale.` : recorded.length > 1 ? "The recorded members do not differ." : "Only one member is recorded: a larger --record-mib, or --record all, records more groups whole."}</span>
      <${TokenLegend} episode=${like} name=${colour} /></div>
    <div class="members">${data.members.map((member) => html`<${Member} key=${member.trajectory} run=${run} member=${member} difference=${first} paint=${paint} whole=${whole} />`)}</div>`;
}
