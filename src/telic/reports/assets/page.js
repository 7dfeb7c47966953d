// Draws the charts of a report, and keeps a live one up to date. The data is in the page itself.
(() => {
  "use strict";
  const settings = JSON.parse(document.getElementById("settings").textContent);
  let charts = JSON.parse(document.getElementById("charts").textContent);
  let views = [];
  let logarithmic = false;

  // Charts bring their data with them: nothing is ever loaded.
  const loader = { load: () => Promise.reject(new Error("nothing is loaded")), sanitize: () => Promise.reject(new Error("no links")) };

  const isPositive = (chart) => chart.data.values.every((row) => row.y === undefined || row.y === null || row.y > 0);

  function scaled(chart) {
    if (!logarithmic || !chart.encoding.y.scale || !isPositive(chart)) return chart;
    const copy = structuredClone(chart);
    copy.encoding.y.scale = { type: "log", nice: true };
    return copy;
  }

  async function draw() {
    for (const view of views) view.finalize();
    views = [];
    for (const [i, chart] of charts.entries()) {
      const place = document.getElementById("chart-" + i);
      if (place === null) continue;
      try {
        const spec = vegaLite.compile(scaled(chart)).spec;
        // Vega-Lite draws a legend of dashes in no colour where colour means something else.
        for (const legend of spec.legends || []) {
          if (legend.strokeDash && legend.encode) legend.encode.symbols.update.stroke = { value: "#30343a" };
        }
        const view = new vega.View(vega.parse(spec), { renderer: "svg", container: place, hover: true, loader, logLevel: vega.Error });
        views.push(view);
        await view.runAsync();
      } catch (error) {
        place.textContent = "This chart could not be drawn: " + error;
      }
    }
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
  }

  function listen() {
    const box = document.getElementById("logarithmic");
    if (box === null) return;
    box.checked = logarithmic;
    box.addEventListener("change", () => { logarithmic = box.checked; draw(); });
  }

  async function follow() {
    let seen = "";
    for (;;) {
      await new Promise((done) => setTimeout(done, 2000));
      try {
        const answer = await fetch(settings.live, { cache: "no-store", headers: { "If-None-Match": seen } });
        if (answer.status === 304) { tell("Live: new values appear by themselves."); continue; }
        if (!answer.ok) { tell("The board no longer gives these runs (" + answer.status + ")."); continue; }
        seen = answer.headers.get("ETag") || "";
        const shown = await answer.json();
        const open = [...document.querySelectorAll("details[open]")].map((one) => one.id);
        const at = window.scrollY;
        document.title = shown.title;
        document.getElementById("shown").innerHTML = shown.html;
        for (const id of open) { const one = document.getElementById(id); if (one) one.open = true; }
        charts = shown.charts;
        listen();
        await draw();
        window.scrollTo(0, at);
        tell("Live: new values appear by themselves.");
      } catch (error) {
        tell("The board does not answer; what is shown stays as it was.");
      }
    }
  }

  function tell(text) { document.getElementById("note").textContent = text; }

  listen();
  draw();
  if (settings.live !== null) follow();
})();
