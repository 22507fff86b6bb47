// A turn: what the model was given, what it sampled, what the environment paid and how long it took.
import { html, useMemo, useState } from "./html.js";
import { number, plural, seconds, spelled } from "./format.js";
import { laneOf, spanName } from "./lanes.js";
import { at, foundTokens, isTrained, piecesOf } from "./tokens.js";

const FOLDED = 1200; // letters of what the model was given that are shown before the reader asks for all
const LINES = 14;
const LONG = 1500; // tokens of a turn, or a hundredth of the letters of a text, shown before the reader asks for all

// Text with the places marked in which another text is found.
export function Found({ text, find }) {
  if (!find) return html`${text}`;
  const [whole, part] = [text.toLowerCase(), find.toLowerCase()];
  const pieces = [];
  let from = 0;
  for (let place = whole.indexOf(part); place >= 0; place = whole.indexOf(part, from)) {
    pieces.push(text.slice(from, place), html`<mark class="found">${text.slice(place, place + part.length)}</mark>`);
    from = place + part.length;
  }
  return html`${pieces}${text.slice(from)}`;
}

// The beginning of a text that is folded, in whole lines where it has them.
function beginning(text, limit) {
  const lines = text.split("\n", LINES + 1);
  const short = lines.length > LINES ? lines.slice(0, LINES).join("\n") : text;
  return short.length > limit ? short.slice(0, limit) : short;
}

// A text; a long one is folded, what the model was given (`given`) sooner than what it wrote.
export function LongText({ text, find, given }) {
  const [all, setAll] = useState(false);
  const shown = all || find ? text : given ? beginning(text, FOLDED) : text.slice(0, LONG * 10);
  const cut = text.length - shown.length;
  const foldable = cut > 0 || (all && text.length > FOLDED);
  return html`<pre class="text" dir="auto"><${Found} text=${shown} find=${find} />${cut > 0 && "…"}</pre>
    ${foldable && html`<button type="button" class="fold" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "fold" : `show ${cut} more letters`}</button>`}`;
}

// Sampled tokens, coloured, or the text where they are not known. `cells` shows each token apart, with its white space visible.
export function Tokens(props) {
  const { turn, cells, find } = props;
  const readable = turn.tokens.pieces || (cells && (turn.tokens.ids || []).length > 0);
  return readable ? html`<${Pieces} ...${props} />` : html`<${LongText} text=${turn.text || ""} find=${find} />`;
}

export function Pieces({ turn, paint, cells, chosen, find, mask, quiet, from = 0 }) {
  const [all, setAll] = useState(false);
  const pieces = piecesOf(turn.tokens);
  const marked = useMemo(() => foundTokens(pieces, find), [turn, find]);
  const limit = all || chosen >= LONG ? pieces.length : LONG;
  const shown = useMemo(
    () => pieces.slice(0, limit).map((piece, index) => {
      const hatched = mask && isTrained(at(turn.tokens.mask, index)) === "no" ? " hatched" : "";
      const kind = `token${cells ? " cell" : ""}${hatched}${index === chosen ? " chosen" : ""}${marked.has(index) ? " found" : ""}${index < from || (quiet && at(turn.tokens.mask, index) !== "trained") ? " same" : ""}`;
      return html`<span key=${index} class=${kind} data-turn=${turn.turn} data-token=${index} style=${paint(turn.tokens, index)}>${cells ? spelled(piece) : quiet && !piece.trim() && at(turn.tokens.mask, index) === "trained" ? spelled(piece) + piece.replace(/[^\n]/g, "") : piece}</span>`;
    }),
    [turn, paint, cells, chosen, marked, mask, quiet, limit, from],
  );
  return html`<pre class="text sampled" dir="auto">${shown}</pre>${limit < pieces.length && html`<button type="button" onClick=${() => setAll(true)}>all ${pieces.length} tokens</button>`}`;
}

const known = new Set(["system", "user", "assistant", "tool"]);
const kindOf = (role) => (known.has(role) ? role : "other");

// Roles of the messages that an episode shows, in order of their first appearance; "model" is what was sampled.
export const rolesOf = (turns) => [...new Set([...turns.flatMap((turn) => (turn.prompt_messages || []).filter((message) => message.text).map((message) => message.role)), "model"])];

export function Given({ turn, cells, find, patches, role = "" }) {
  if (role === "model") return null;
  if (cells && turn.prompt && turn.prompt.ids.length) {
    const pieces = piecesOf(turn.prompt);
    const marked = foundTokens(pieces, find);
    const cell = (piece, index) => {
      const patch = patches ? patches.get(index) : undefined;
      const kind = `token cell${marked.has(index) ? " found" : ""}${patch ? " patch" : ""}`;
      const title = `token ${turn.prompt.ids[index]}${patch ? `, ${patch.title}` : ""}`;
      return html`<span key=${index} class=${kind} title=${title} style=${patch ? patch.style : {}}>${patch ? "" : spelled(piece)}</span>`;
    };
    return html`<div class="message given"><div class="role">${plural(pieces.length, "token")} given</div><pre class="text">${pieces.slice(0, LONG * 4).map(cell)}</pre></div>`;
  }
  if (turn.prompt_messages) {
    return turn.prompt_messages.filter((message) => message.text && (!role || message.role === role)).map((message, index) => html`<div class=${`message given of-${kindOf(message.role)}`} key=${index}><div class="role">${message.role}</div><${LongText} text=${message.text} find=${find} given=${true} /></div>`);
  }
  return turn.prompt_text && html`<div class="message given"><div class="role">given</div><${LongText} text=${turn.prompt_text} find=${find} given=${true} /></div>`;
}

const pairs = (values) => Object.entries(values || {}).map(([name, value]) => `${name} ${number(value)}`).join("  ");

// In order of their beginnings, so that tools stand behind the step that called them.
const inOrder = (spans) => [...spans].sort((one, other) => one.start_s - other.start_s || other.seconds - one.seconds);

function Paid({ turn, spans }) {
  const parts = pairs(turn.reward_parts);
  const info = pairs(turn.info);
  return html`<footer><span>reward <b>${number(turn.reward)}</b>${parts && html` <span class="dim">of ${parts}</span>`}</span>${info && html`<span>${info}</span>`}
    ${inOrder(spans).map((span, index) => html`<span key=${index} class=${laneOf(span.name) === "tools" ? "span tool" : "span"}><b>${spanName(span.name)}</b> ${seconds(span.seconds)}</span>`)}</footer>`;
}

function head(turn, several) {
  const [versions, count] = [turn.tokens.version, (turn.tokens.ids || []).length];
  const spread = Array.isArray(versions) ? [...new Set(versions)].sort((one, other) => one - other) : versions === null || versions === undefined ? [] : [versions];
  return [
    several && turn.agent, plural(count, "token"), turn.finish_reason && `ended by ${turn.finish_reason}`,
    spread.length > 0 && (spread.length > 1 ? `versions ${spread[0]} to ${spread.at(-1)}` : `version ${spread[0]}`),
    turn.temperature !== 1 && turn.temperature !== null && turn.temperature !== undefined && `temperature ${number(turn.temperature)}`, turn.experts && "experts recorded",
  ].filter(Boolean).join(" · ");
}

export function Turn({ turn, spans, images, patches, paint, form, colour, chosen, find, role, branch, shared, several, style }) {
  const cells = form === "tokens";
  return html`<section class="turn" id=${`turn-${turn.turn}`} data-turn-box=${turn.turn} style=${style}>
    <header><b>turn ${turn.turn + 1}</b><span class="dim">${head(turn, several)}</span>${branch && html`<span class="badge">${branch}</span>`}${shared && html`<span class="badge">shared with ${shared}</span>`}
      ${turn.unanswered && html`<span class="badge bad">the environment did not answer</span>`}
      ${turn.fresh && turn.turn > 0 && html`<span class="badge">context begun anew${turn.branch_reason ? `: ${turn.branch_reason}` : ""}</span>`}
      ${turn.masked && html`<span class="badge warn">not trained: ${turn.masked}</span>`}</header>
    <${Given} turn=${turn} cells=${cells} find=${find} patches=${patches} role=${role} />${images}
    ${(!role || role === "model") && html`<div class="message"><div class="role">${turn.agent || "model"}${turn.tokens.pieces && turn.tokens.exact === false ? " (the texts of its tokens, each read alone, do not make up its text)" : ""}</div><${Tokens} turn=${turn} paint=${paint} cells=${cells} chosen=${chosen} find=${find} mask=${colour === "mask"} /></div>`}
    ${turn.rewritten && html`<details class="rewritten"><summary><span class="badge">rewritten by the client</span> its next request had this in place of the answer; the sampled tokens count</summary><pre>${turn.rewritten}</pre></details>`}
    <${Paid} turn=${turn} spans=${spans} /></section>`;
}
