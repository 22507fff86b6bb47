// Images of an episode: those of its task, and those that its environment showed to a turn.
import { html } from "./html.js";
import { question, runPath, saved, savedImage } from "./api.js";

export function Images({ run, episode, numbers, what }) {
  if (!numbers.length) return null;
  return html`<div class="images">${numbers.map((index) => {
    const where = runPath(run, "image", episode.episode, index);
    const source = saved ? savedImage(where) : question(where, { attempt: episode.attempt || "" });
    const missing = (event) => (event.target.replaceWith(Object.assign(document.createElement("span"), { className: "empty", textContent: `image ${index + 1} is not there, or is no PNG, JPEG, GIF or WebP` })));
    return source ? html`<img key=${index} src=${source} alt=${`image ${index + 1}, ${what}`} title=${what} onError=${missing} />` : html`<span key=${index} class="empty">image ${index + 1} is not in this file</span>`;
  })}</div>`;
}
