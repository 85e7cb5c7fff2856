"use strict";
// Everything on the pages is written by the server; this asks for it again when something moves.

// ---------------------------------------------------------------- colours

const remembered = "cpsgd-theme";
for (const choice of document.querySelectorAll('input[name="theme"]')) {
  choice.checked = choice.value === (localStorage.getItem(remembered) || "auto");
  choice.addEventListener("change", () => localStorage.setItem(remembered, choice.value));
}

// ---------------------------------------------------------------- copying

for (const button of document.querySelectorAll("[data-copy]")) {
  const name = button.textContent;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy by hand";
    }
    setTimeout(() => { button.textContent = name; }, 1500);
  });
}

// ---------------------------------------------------------------- live parts of a page

// New HTML from the server takes the place of the old; what was opened or scrolled to stays so.
function replace(old, html) {
  const open = [...old.querySelectorAll("details")].map((each) => each.open);
  const focus = old.contains(document.activeElement) ? document.activeElement.tagName : null;
  old.innerHTML = html;
  old.querySelectorAll("details").forEach((each, index) => { each.open = open[index] || false; });
  if (focus === "SUMMARY") old.querySelector("summary")?.focus();
}

// Answers come as server-sent events, each of which is JSON.
function listen(address, handlers) {
  const source = new EventSource(address);
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => handle(JSON.parse(event.data), source));
  }
  return source;
}

const live = document.getElementById("live");
if (live?.dataset.events) {
  listen(live.dataset.events, {
    update: (parts) => {
      for (const [id, html] of Object.entries(parts)) {
        const old = document.getElementById(id);
        if (old) replace(old, html);
      }
    },
    done: (_, source) => source.close(),
  });
}

// ---------------------------------------------------------------- the planner

const form = document.getElementById("question");
if (form) {
  const status = document.getElementById("status");
  const plan = document.getElementById("plan");
  const proof = document.getElementById("proof");
  const frontier = document.getElementById("frontier");
  const bits = ["", 0.05, 0.1, 0.25, 0.5, 1, 1.6, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20];

  function fieldOf(slider) { return document.getElementById(slider.dataset.for); }

  // Sliders go from 0 to 1000, mostly on a logarithmic scale.
  function toField(slider) {
    const share = slider.value / 1000;
    const { low, high, scale } = slider.dataset;
    if (scale === "bits") return String(bits[Math.round(share * (bits.length - 1))]);
    const value = low * (high / low) ** share;
    if (scale === "log-power") return `1e${Math.round(Math.log10(value))}`;
    const short = Number(value.toPrecision(scale === "log-whole" ? 2 : 3));
    return scale === "log-whole" ? String(Math.max(1, Math.round(short))) : String(short);
  }

  function toSlider(slider) {
    const value = Number(fieldOf(slider).value);
    const { low, high, scale } = slider.dataset;
    let share;
    if (scale === "bits") {
      const found = fieldOf(slider).value.trim() === "" ? 0 : bits.findIndex((each) => each !== "" && each >= value);
      share = (found < 0 ? bits.length - 1 : found) / (bits.length - 1);
    } else {
      share = Math.log(value / low) / Math.log(high / low);
    }
    slider.value = Number.isFinite(share) ? Math.round(1000 * Math.min(Math.max(share, 0), 1)) : 0;
    slider.setAttribute("aria-valuetext", fieldOf(slider).value || "automatic");
  }

  const sliders = [...form.querySelectorAll('input[type="range"]')];
  function settle() {
    const sampled = ["poisson", "fixed-size"].includes(form.elements.scheme.value);
    document.getElementById("rate-control").hidden = !sampled;
    sliders.forEach(toSlider);
  }

  let source = null;
  let waiting = 0;
  let last = null;
  function ask() {
    const asked = new URLSearchParams(new FormData(form)).toString();
    if (asked === last) return;
    last = asked;
    history.replaceState(null, "", `/?${asked}`);
    source?.close();
    plan.setAttribute("aria-busy", "true");
    status.textContent = "Planning…";
    source = listen(`/planner/answer?${asked}`, {
      texts: (texts) => {
        for (const [name, text] of Object.entries(texts)) document.getElementById(`copy-${name}`).textContent = text;
      },
      plan: (html) => {
        replace(plan, html);
        plan.setAttribute("aria-busy", "false");
        status.textContent = "The frontier is being proved…";
      },
      proof: (html) => replace(proof, html),
      frontier: (html) => replace(frontier, html),
      done: (words, stream) => {
        stream.close();
        plan.setAttribute("aria-busy", "false");
        status.textContent = words;
      },
    });
    source.onerror = () => {
      source.close();
      last = null;
      status.textContent = "The dashboard does not answer; is it still running?";
    };
  }
  function soon() {
    clearTimeout(waiting);
    waiting = setTimeout(ask, 200);
  }

  for (const slider of sliders) {
    slider.addEventListener("input", () => {
      fieldOf(slider).value = toField(slider);
      slider.setAttribute("aria-valuetext", fieldOf(slider).value || "automatic");
      soon();
    });
  }
  for (const kind of ["input", "change"]) {
    form.addEventListener(kind, (event) => {
      if (event.target.type === "range") return;
      settle();
      soon();
    });
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  settle();
  ask();
}
