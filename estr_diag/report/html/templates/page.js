"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const read = (id) => { const at = document.getElementById(`${id}-data`); return at ? JSON.parse(at.textContent) : null; };
  const number = (x) => x === null || x === undefined || Number.isNaN(x) ? "–" : Math.abs(x) >= 1e4 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(2) : String(Number(x.toPrecision(3)));

  // Tables: a click on a heading sorts; what has no number comes last.
  for (const table of $$("table.sortable")) {
    $$("th", table).forEach((th, column) => $("button", th).addEventListener("click", () => {
      const up = th.getAttribute("aria-sort") !== "descending";
      $$("th", table).forEach((other) => other.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", up ? "descending" : "ascending");
      const key = (row) => { const cell = row.cells[column]; return cell.dataset.v === undefined || cell.dataset.v === "" ? null : Number(cell.dataset.v); };
      const body = table.tBodies[0];
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === null && y === null) return a.cells[column].textContent.localeCompare(b.cells[column].textContent) * (up ? 1 : -1);
        return x === null ? 1 : y === null ? -1 : (up ? y - x : x - y);
      });
      body.append(...rows);
    }));
  }

  // Steps: one metric over a window of steps, with its mean there.
  const steps = read("steps"), chart = $("#ui-chart");
  if (steps && chart) {
    const [metric, from, to] = ["#ui-metric", "#ui-from", "#ui-to"].map((id) => $(id));
    const el = (name, attributes, label) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [k, v] of Object.entries(attributes)) made.setAttribute(k, v);
      if (label !== undefined) made.textContent = label;
      chart.append(made);
      return made;
    };
    const draw = () => {
      const lo = Math.min(+from.value, +to.value), hi = Math.max(+from.value, +to.value);
      const rows = steps.rows.filter((r) => r.step >= lo && r.step <= hi && r[metric.value] && r[metric.value][0] !== null);
      chart.replaceChildren();
      const said = $("#ui-window");
      if (!rows.length) { said.textContent = "no value of this metric between these steps"; return; }
      const ends = rows.flatMap((r) => { const [v, se] = r[metric.value]; return [v - 1.96 * (se || 0), v + 1.96 * (se || 0)]; });
      let [low, high] = [Math.min(...ends), Math.max(...ends)];
      if (low === high) { low -= 0.5; high += 0.5; }
      const x = (s) => 70 + 560 * (hi === lo ? 0.5 : (s - lo) / (hi - lo)), y = (v) => 230 - 205 * (v - low) / (high - low);
      for (let i = 0; i <= 4; i++) {
        const v = low + (high - low) * i / 4;
        el("line", { x1: 70, x2: 630, y1: y(v), y2: y(v), stroke: "currentColor", "stroke-opacity": 0.15 });
        el("text", { x: 64, y: y(v) + 4, "text-anchor": "end" }, number(v));
      }
      for (const s of [...new Set([lo, Math.round((lo + hi) / 2), hi])]) el("text", { x: x(s), y: 248, "text-anchor": "middle" }, String(s));
      el("text", { x: 350, y: 266, "text-anchor": "middle" }, "step");
      el("text", { x: 70, y: 14 }, `${metric.value}, ${steps.units[metric.value] || "1"}; bars are 95 % intervals by sequence`);
      if (rows.length > 1) el("polyline", { points: rows.map((r) => `${x(r.step)},${y(r[metric.value][0])}`).join(" "), fill: "none", stroke: "var(--accent)", "stroke-width": 1.5 });
      for (const r of rows) {
        const [v, se] = r[metric.value];
        if (se) el("line", { x1: x(r.step), x2: x(r.step), y1: y(v - 1.96 * se), y2: y(v + 1.96 * se), stroke: "var(--accent)", "stroke-opacity": 0.5 });
        el("circle", { cx: x(r.step), cy: y(v), r: 2.5, fill: "var(--accent)" });
      }
      const tokens = rows.reduce((n, r) => n + r.tokens, 0);
      const mean = rows.reduce((n, r) => n + r.tokens * r[metric.value][0], 0) / tokens;
      said.textContent = `steps ${lo} to ${hi}: ${rows.length} steps, ${tokens.toLocaleString("en")} tokens, mean of the steps ${number(mean)} (weighted by tokens)`;
      for (const row of $$("#by-step tbody tr")) { const s = Number(row.cells[0].dataset.v); row.hidden = s < lo || s > hi; }
    };
    [metric, from, to].forEach((control) => control.addEventListener("input", draw));
    draw();
  }

  // Rules: what one of them masks, by entropy, lag, step or position.
  const rules = read("rules"), chosen = $("#ui-rule"), by = $("#ui-by");
  if (rules && chosen) {
    const show = () => {
      const rows = rules[chosen.value][by.value] || [];
      const top = Math.max(1e-12, ...rows.map((r) => r[3] || 0));
      const body = $("#ui-breakdown tbody");
      body.replaceChildren(...rows.map(([label, n, undecided, masked]) => {
        const row = document.createElement("tr");
        const cell = (content, css = "n") => { const td = document.createElement("td"); td.className = css; td.append(content); row.append(td); };
        cell(label, ""); cell(n.toLocaleString("en")); cell(undecided ? undecided.toLocaleString("en") : "–");
        cell(masked === null ? "–" : `${(100 * masked).toFixed(2)} %`);
        const bar = document.createElement("span");
        bar.className = "bar"; bar.style.width = `${8 * (masked || 0) / top}em`;
        cell(bar, "");
        return row;
      }));
      $("#ui-breakdown th").textContent = by.selectedOptions[0].textContent;
      if (!rows.length) { const row = body.insertRow(); row.insertCell().textContent = "not computed: the log does not have it"; }
    };
    [chosen, by].forEach((control) => control.addEventListener("input", show));
    show();
  }

  // Tokens: coloured by a number, or by a rule's decision; all columns on hover.
  const shown = read("tokens"), colour = $("#ui-colour");
  if (shown && colour) {
    const spans = $$(".t"), dark = matchMedia("(prefers-color-scheme: dark)");
    const values = (span) => span.dataset.v ? span.dataset.v.split(",").map((v) => v === "" ? null : Number(v)) : [];
    const derived = {
      "|δ|": (v) => v("delta") === null ? null : Math.abs(v("delta")), "δ": (v) => v("delta"),
      "|z| = |δ|/√(H + 0.01)": (v) => v("delta") === null || v("entropy") === null ? null : Math.abs(v("delta")) / Math.sqrt(v("entropy") + 0.01),
      "S = δ²/(H + 0.01)": (v) => v("delta") === null || v("entropy") === null ? null : v("delta") ** 2 / (v("entropy") + 0.01),
      "entropy H": (v) => v("entropy"), "p infer": (v) => v("p_infer"), "p train": (v) => v("p_train"),
    };
    const paint = () => {
      const rule = colour.value.startsWith("rule:") ? Number(colour.value.slice(5)) : null;
      const of = rule === null ? derived[colour.value] : null;
      const at = spans.map((span) => { const v = values(span); return of && v.length ? of((name) => { const i = shown.columns.indexOf(name); return i < 0 ? null : v[i] ?? null; }) : null; });
      const sizes = at.filter((v) => v !== null).map(Math.abs).sort((a, b) => a - b);
      // The 99th percentile is full colour: one extreme token does not make the others pale.
      const full = sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.99 * sizes.length))] || sizes[sizes.length - 1] || 1 : 1;
      spans.forEach((span, i) => {
        const decision = rule === null ? undefined : (span.dataset.r || "")[rule];
        span.classList.toggle("masked", decision === "0");
        span.classList.toggle("open", decision === "?");
        const share = at[i] === null ? 0 : Math.min(1, Math.abs(at[i]) / full);
        const [hue, light] = [at[i] < 0 ? "203, 100%" : "37, 97%", dark.matches ? "35%" : "50%"];
        span.style.backgroundColor = share ? `hsla(${hue}, ${light}, ${(0.9 * share).toFixed(3)})` : "";
      });
      $("#ui-scale").textContent = rule === null
        ? (sizes.length ? `0 to ${number(full)} and beyond${colour.value === "δ" ? "; orange: the trainer finds it likelier, blue: less likely" : ""}` : "not computed: the log lacks a column that it needs")
        : "crossed out and pale: masked; dotted: undecided";
      $("#ui-ramp").hidden = rule !== null || !sizes.length;
    };
    const tip = document.createElement("div");
    tip.id = "tip"; tip.hidden = true; document.body.append(tip);
    const tell = (span, x, y) => {
      const v = values(span);
      const lines = [`position ${span.dataset.p}`, ...shown.columns.map((name, i) => v[i] === null || v[i] === undefined ? null : `${name} ${number(v[i])}`).filter(Boolean)];
      shown.rules.forEach((name, i) => { const d = (span.dataset.r || "")[i]; if (d) lines.push(`${name}: ${d === "1" ? "kept" : d === "0" ? "masked" : "undecided"}`); });
      if (span.classList.contains("out")) lines.push("not counted: outside the loss mask, or a log-prob is missing");
      if (span.classList.contains("new")) lines.push("first token of new weights");
      tip.textContent = lines.join("\n"); tip.hidden = false;
      const box = tip.getBoundingClientRect();
      tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 4))}px`;
      tip.style.top = `${y + 16 + box.height > innerHeight ? Math.max(4, y - box.height - 8) : y + 16}px`;
    };
    for (const type of ["pointerover", "click"]) document.addEventListener(type, (event) => {
      const span = event.target.closest ? event.target.closest(".t") : null;
      if (span) tell(span, event.clientX, event.clientY); else tip.hidden = true;
    });
    colour.addEventListener("input", paint);
    dark.addEventListener("change", paint);
    paint();
  }
})();
