// Text for the clipboard; where the browser refuses, the text is shown to be copied by hand.
import { html, useState } from "./html.js";

export function CopyButton({ what, label }) {
  const [state, setState] = useState({ done: false, text: "" });
  const copy = async () => {
    const text = typeof what === "function" ? await what() : what;
    try {
      await navigator.clipboard.writeText(text);
      setState({ done: true, text: "" });
      setTimeout(() => setState({ done: false, text: "" }), 1500);
    } catch {
      setState({ done: false, text });
    }
  };
  return html`<button type="button" class="copy" onClick=${() => copy().catch((error) => setState({ done: false, text: error.message }))}>${state.done ? "copied" : label}</button>
    ${state.text && html`<textarea class="mono" rows="6" cols="60" readonly value=${state.text} aria-label="text to copy"></textarea>`}`;
}
