// Shows the value of a line under the pointer. The server draws the lines.
"use strict";

(() => {
  let shown = null;

  function value(svg, x) {
    const line = Array.from(svg.querySelectorAll("polyline.line"));
    let best = null;
    for (const point of line.flatMap((one) => one.getAttribute("points").split(" "))) {
      const [px, py] = point.split(",").map(Number);
      if (best === null || Math.abs(px - x) < Math.abs(best[0] - x)) best = [px, py];
    }
    return best;
  }

  function scaled(at, from, to, range) {
    const [low, high] = range.split(" ").map(Number);
    return low + ((high - low) * (at - from)) / (to - from);
  }

  function hide() {
    if (shown) shown.remove();
    shown = null;
  }

  function show(svg, event) {
    hide();
    const matrix = svg.getScreenCTM();
    if (!matrix) return;
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
    const found = value(svg, at.x);
    if (!found) return;
    const [left, right, top, bottom] = svg.dataset.plot.split(" ").map(Number);
    const step = Math.round(scaled(found[0], left, right, svg.dataset.x));
    const of = scaled(found[1], bottom, top, svg.dataset.y);
    const told = Math.abs(of) >= 1000 ? Math.round(of).toLocaleString("en") : of.toPrecision(5);
    shown = document.createElementNS("http://www.w3.org/2000/svg", "g");
    shown.setAttribute("class", "pointer");
    const middle = found[0] > (left + right) / 2;
    shown.innerHTML =
      `<line x1="${found[0]}" x2="${found[0]}" y1="${top}" y2="${bottom}"></line>` +
      `<circle cx="${found[0]}" cy="${found[1]}" r="3"></circle>` +
      `<text x="${found[0] + (middle ? -8 : 8)}" y="${top + 12}" ` +
      `text-anchor="${middle ? "end" : "start"}">step ${step.toLocaleString("en")}: ${told}</text>`;
    svg.append(shown);
  }

  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest ? event.target.closest("svg.chart") : null;
    if (svg) show(svg, event);
    else hide();
  });
})();
