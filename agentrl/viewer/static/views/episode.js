// An episode: its turns as messages or as tokens, coloured by a figure; its rewards, branches, agents and times.
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { ask, question, runPath, useData } from "../api.js";
import { lineage, BranchTree } from "../branches.js";
import { CopyButton } from "../copy.js";
import { TokenFigures } from "../figures.js";
import { number, plural, seconds, valueText } from "../format.js";
import { Images, imagesOf, imagesOfTask, patchesOf, sourceOf } from "../images.js";
import { useKeys } from "../keys.js";
import { Lanes, laneOf } from "../lanes.js";
import { Empty, Facts, StatusBadge } from "../legend.js";
import { address, go, setQuery, toEpisode, toGroup, toStep } from "../router.js";
import { useDark } from "../theme.js";
import { FIGURES, TokenLegend, at, coloursOf, isTrained, painter } from "../tokens.js";
import { Turn, rolesOf } from "../turn.js";

const pairs = (values) => Object.entries(values || {}).map(([name, value]) => `${name} ${number(value)}`).join("  ");

// The step that trained a trajectory, and how many of its tokens, where the learner said so.
function TrainedBadge({ one, turns }) {
  const masks = turns.flatMap((turn) => (turn.tokens.ids || []).map((_, index) => isTrained(at(turn.tokens.mask, index))));
  const count = masks.filter((mask) => mask === "yes").length;
  const said = masks.length > 0 && !masks.includes("not recorded");
  const words = !said || count === masks.length ? "" : count ? `, ${count} of ${masks.length} tokens` : ", but none of its tokens";
  return html`<span class=${said && !count ? "badge bad" : "badge good"}>trained in step ${number(one.trained_step)}${words}</span>`;
}

function Head({ run, episode, foreign }) {
  const { task } = episode;
  const label = valueText(task.label);
  const links = [
    ["group", html`<a href=${toGroup(run, episode.group, { attempt: episode.attempt || "", source: episode.source === "train" ? "" : episode.source })}>${episode.group}</a>`],
    ["step", episode.step && html`<a href=${toStep(run, episode.step)}>${episode.step}</a>`],
    ["task", html`<a class="mono" href=${address(["run", run, "task", task.id])}>${task.id}</a>`],
    ["label", label !== "–" && html`<span class="mono" dir="auto">${label}</span> <span class="tag">${task.label_type || typeof task.label}</span>`],
    ["weights at its beginning", !foreign && `version ${number(episode.version)}`],
    ["attempt", episode.attempts && episode.attempts.length > 1 && html`${episode.attempts.map((attempt) => html`<a key=${attempt} class=${attempt === episode.attempt ? "badge good" : "badge"} href=${toEpisode(run, episode.episode, { attempt })}>${attempt + 1}</a> `)}`],
    ["forked", episode.forked_from && html`from <a href=${toEpisode(run, episode.forked_from, { attempt: episode.attempt || "" })}>${episode.forked_from}</a> after ${plural(episode.forked_turns, "turn")}`],
    ["forks", (episode.forks || []).length > 0 && html`${episode.forks.map((fork) => html`<a key=${fork.episode} href=${toEpisode(run, fork.episode, { attempt: episode.attempt || "" })}>${fork.episode}</a> after ${plural(fork.turns, "turn")}  `)}`],
    ["source", episode.source !== "train" && episode.source], ["metrics", pairs(episode.metrics)],
    ["time", Object.entries(episode.timings || {}).map(([name, value]) => `${name.replace(/_s$/, "")} ${seconds(value)}`).join("  ")],
    ["metadata", Object.keys(task.metadata || {}).length > 0 && valueText(task.metadata)],
  ];
  return html`<h1>Episode ${episode.episode} <${StatusBadge} status=${episode.status} /> ${episode.verdict && episode.verdict !== "kept" && html`<${StatusBadge} status=${episode.verdict} title=${episode.verdict_reason} />`}</h1>
    <${Facts} rows=${links} />
    ${episode.trajectories.map((one) => html`<p key=${one.id} class="reward">${one.agent && html`<b>${one.agent}</b> `}reward <b>${number(one.reward)}</b> <span class="dim">${pairs(one.reward_parts)}</span> score <b>${number(one.score)}</b>
      ${one.mask === "trained" ? html`<${TrainedBadge} one=${one} turns=${episode.turns.filter((turn) => episode.trajectories[turn.trajectory] === one)} />` : one.mask && one.mask !== "unknown" && html`<span class="badge warn" title=${one.mask_text}>not trained: ${one.mask.replaceAll("_", " ")}</span>`}
      ${one.mask !== "trained" && !foreign && html` <span class="dim">${one.mask_text}</span>`}</p>`)}
    ${episode.verdict_reason && html`<p class="note">Its group was ${episode.verdict}: ${episode.verdict_reason}</p>`}
    ${episode.clipped && html`<p class="note">The record was cut, because it was too long.</p>`}
    ${episode.error && html`<pre class="note">${episode.error}</pre>`}`;
}

function Controls({ episode, form, colour, find, role, lanes, several }) {
  const roles = rolesOf(episode.turns);
  const next = (event) => {
    event.preventDefault();
    const marks = [...document.querySelectorAll(".found")];
    const at = marks.findIndex((mark) => mark.dataset.at) + 1;
    for (const mark of marks) delete mark.dataset.at;
    if (marks.length) {
      marks[at % marks.length].dataset.at = "1";
      marks[at % marks.length].scrollIntoView({ block: "center" });
    }
  };
  return html`<div class="tools"><span role="group" aria-label="form">${[["messages", "Messages"], ["tokens", "Tokens"]].map(
    ([name, text]) => html`<button type="button" key=${name} class=${form === name ? "on" : ""} aria-pressed=${form === name} onClick=${() => setQuery({ form: name === "messages" ? "" : name })}>${text}</button>`,
  )}</span>
    <label>colour by <select aria-label="colour by" value=${colour} onChange=${(event) => setQuery({ colour: event.target.value })}>
      ${coloursOf(episode).map((name) => html`<option key=${name} value=${name}>${name === "mask" ? "mask" : FIGURES[name].text}</option>`)}<option value="none">nothing</option></select></label>
    ${roles.length > 2 && form === "messages" && html`<label>role <select aria-label="role" value=${role} onChange=${(event) => setQuery({ role: event.target.value })}><option value="">all</option>${roles.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>`}
    ${several && html`<button type="button" class=${lanes ? "on" : ""} aria-pressed=${lanes} onClick=${() => setQuery({ lanes: lanes ? "0" : "" })}>agents side by side</button>`}
    <form onSubmit=${next}><input type="search" placeholder="Find in this episode" aria-label="Find in this episode" value=${find} onInput=${(event) => setQuery({ find: event.target.value })} /></form>
    <${TokenLegend} episode=${episode} name=${colour} /></div>`;
}

function Commands({ run, episode }) {
  const json = async () => JSON.stringify(await ask(question(runPath(run, "record", episode.episode), { attempt: episode.attempt || "" })), null, 1);
  return html`<h2>Take it along</h2><p class="tools"><${CopyButton} label="copy as JSON" what=${json} /><${CopyButton} label="copy link" what=${() => location.href} /></p>
    ${Object.entries(episode.commands || {}).filter(([, words]) => words).map(([name, words]) => html`<p key=${name} class="command-line"><code>${words}</code> <${CopyButton} label="copy" what=${words} /></p>`)}`;
}

function Times({ run, episode }) {
  const spans = episode.spans || [];
  if (!spans.length) return null;
  const turnOf = (number) => episode.turns.find((turn) => turn.number === number);
  const placed = spans.map((span) => ({ lane: laneOf(span.name), name: span.name, start_s: span.start_s, end_s: span.start_s + span.seconds, turn: turnOf(span.turn) }));
  return html`<h2>Time</h2><${Lanes} lanes=${{ spans: placed, begin_s: 0 }} href=${(span) => (span.turn ? toEpisode(run, episode.episode, { turn: span.turn.turn }) : "")} note="A span leads to its turn." />`;
}

// Times of a turn; that of the reset is the first turn's.
const spansOf = (episode, turn) => (episode.spans || []).filter((span) => span.turn === turn.number || (turn.turn === 0 && (span.turn === null || span.turn === undefined)));

// Chosen token, its keys, and the token under the pointer.
function usePlace(episode, query) {
  const [hover, setHover] = useState(null);
  const chosen = query.turn === undefined || query.token === undefined ? null : { turn: Number(query.turn), token: Number(query.token) };
  const placeOf = (event) => {
    const found = event.target.closest("[data-token]");
    return found && found.dataset.turn !== undefined ? { turn: Number(found.dataset.turn), token: Number(found.dataset.token) } : null;
  };
  const step = (by) => {
    const place = chosen || { turn: 0, token: -1 };
    const turns = episode ? episode.turns : [];
    let [turn, token] = [place.turn, place.token + by];
    if (turns[turn] && token >= turns[turn].tokens.ids.length) [turn, token] = [turn + 1, 0];
    if (token < 0 && turn > 0) [turn, token] = [turn - 1, turns[turn - 1].tokens.ids.length - 1];
    if (turns[turn] && token >= 0) setQuery({ turn, token });
  };
  useKeys({ ArrowRight: ["next token", () => step(1)], ArrowLeft: ["token before", () => step(-1)] });
  const events = {
    onMouseOver: (event) => setHover(placeOf(event)),
    onMouseLeave: () => setHover(null),
    onClick: (event) => {
      const place = placeOf(event);
      if (place) setQuery(place);
    },
  };
  return { chosen, shown: hover || chosen, events };
}

function useTurnKeys(run, episode, form, colour) {
  const move = (by) => {
    const boxes = [...document.querySelectorAll("[data-turn-box]")];
    const at = boxes.findIndex((box) => box.classList.contains("marked"));
    const next = boxes[Math.min(boxes.length - 1, Math.max(0, at + by))];
    for (const box of boxes) box.classList.toggle("marked", box === next);
    if (next) next.scrollIntoView({ block: "start" });
  };
  const cycle = () => {
    const names = [...coloursOf(episode), "none"];
    setQuery({ colour: names[(names.indexOf(colour) + 1) % names.length] });
  };
  useKeys({
    j: ["next turn", () => move(1)], k: ["turn before", () => move(-1)],
    n: ["next episode", () => episode && episode.next && go(toEpisode(run, episode.next))], p: ["episode before", () => episode && episode.previous && go(toEpisode(run, episode.previous))],
    m: ["messages or tokens", () => setQuery({ form: form === "tokens" ? "" : "tokens" })], c: ["next colour", () => episode && cycle()],
  });
}

export function EpisodeView({ run, info, name, query }) {
  const { data: episode, error } = useData(question(runPath(run, "episode", name), { attempt: query.attempt }), run);
  const dark = useDark();
  const [form, colour, find] = [query.form || "messages", query.colour || (episode && episode.fields.includes("logprob") ? "logprob" : "none"), query.find || ""];
  const paint = useMemo(() => (episode ? painter(episode, colour, dark) : () => ({})), [episode, colour, dark]);
  const { chosen, shown, events } = usePlace(episode, query);
  const scrolled = useRef(null);
  useTurnKeys(run, episode, form, colour);
  useEffect(() => {
    const place = episode && query.turn !== undefined ? `${query.turn}/${query.token}` : "";
    if (place && scrolled.current !== place) {
      const token = document.querySelector(`[data-turn="${query.turn}"][data-token="${query.token}"]`);
      (token || document.getElementById(`turn-${query.turn}`))?.scrollIntoView({ block: scrolled.current === null ? "center" : "nearest" });
    }
    if (episode) scrolled.current = place;
  });
  if (error && !episode) return html`<${Empty}>${error} <a href=${address(["run", run, "episodes"])}>All recorded episodes</a><//>`;
  if (!episode) return null;
  const role = form === "messages" && rolesOf(episode.turns).includes(query.role) ? query.role : "";
  const agents = [...new Set(episode.turns.map((turn) => turn.agent))];
  const several = agents.length > 1;
  const lanes = several && query.lanes !== "0";
  const branches = episode.branches || [];
  const path = query.branch === undefined ? null : lineage(branches, Number(query.branch));
  const turns = episode.turns.filter((turn) => !path || path.has(turn.branch));
  const box = (turn, row) => html`<${Turn} key=${turn.turn} turn=${turn} images=${html`<${Images} run=${run} episode=${episode} numbers=${imagesOf(turn)} what=${`shown before turn ${turn.turn + 1}`} />`} patches=${form === "tokens" && patchesOf(turn, (index) => sourceOf(run, episode, index))} spans=${spansOf(episode, turn)} paint=${paint} form=${form} colour=${colour}
    chosen=${chosen && chosen.turn === turn.turn ? chosen.token : -1} find=${find} role=${role} several=${several} branch=${branches.length > agents.length ? `branch ${turn.branch + 1}` : ""} shared=${turn.number < (episode.forked_turns || 0) ? episode.forked_from : ""}
    style=${lanes ? { gridColumn: String(agents.indexOf(turn.agent) + 1), gridRow: String(row + 1) } : {}} />`;
  return html`<div class="split"><div><${Head} run=${run} episode=${episode} foreign=${info.kind === "foreign"} /><${Images} run=${run} episode=${episode} numbers=${imagesOfTask(episode)} what="of the task" />
      ${branches.length > 1 && branches.length > agents.length && html`<${BranchTree} branches=${branches} chosen=${query.branch === undefined ? null : Number(query.branch)} several=${several} />`}
      <${Controls} episode=${episode} form=${form} colour=${colour} find=${find} role=${role} lanes=${lanes} several=${several} />
      ${!turns.length && html`<${Empty}>No turn is recorded: the model was not asked before the episode ended.<//>`}
      <div class=${lanes ? "agents" : ""} style=${lanes ? { gridTemplateColumns: `repeat(${agents.length}, minmax(0, 1fr))` } : {}} ...${events}>${turns.map(box)}</div>
      ${(episode.unread_images || []).length > 0 && html`<p class="dim">The environment showed these images, and no turn was sampled after them:</p><${Images} run=${run} episode=${episode} numbers=${episode.unread_images} what="shown at the end" />`}
      <${Times} run=${run} episode=${episode} /></div>
    <aside class="side token-side" aria-label="token"><p class="tools">${episode.previous && html`<a href=${toEpisode(run, episode.previous)}>← ${episode.previous}</a>`}${episode.next && html`<a href=${toEpisode(run, episode.next)}>${episode.next} →</a>`}</p>
      <h2>Token</h2><${TokenFigures} episode=${episode} place=${shown} /><p class="dim">${plural(episode.turns.length, "turn")}, ${plural(episode.turns.reduce((sum, turn) => sum + (turn.tokens.ids || []).length, 0), "sampled token")}</p>
      <${Commands} run=${run} episode=${episode} /></aside></div>`;
}
