(() => {
  "use strict";
  const REACH = 40; // points: a pointer farther from every mark reads nothing
  const plots = Array.from(document.querySelectorAll(".plot[data-marks]"), prepare);
  document.querySelectorAll("th[data-row]").forEach(asButton);

  // One figure: a ring around the mark being read, its words in the line beneath.
  function prepare(box) {
    const svg = box.querySelector("svg");
    const readout = box.querySelector(".readout");
    const marks = JSON.parse(box.dataset.marks);
    const hint = readout.textContent;
    const ring = document.createElementNS(svg.namespaceURI, "circle");
    ring.setAttribute("r", "5");
    ring.setAttribute("class", "ring");
    ring.style.display = "none";
    svg.append(ring);
    let current = -1;
    let pinned = false;

    function show(index) {
      current = Math.max(0, Math.min(marks.length - 1, index));
      const [x, y, text, row] = marks[current];
      ring.setAttribute("cx", x);
      ring.setAttribute("cy", y);
      ring.style.display = "";
      readout.textContent = text;
      choose(row);
    }

    function clear() {
      current = -1;
      pinned = false;
      ring.style.display = "none";
      readout.textContent = hint;
      choose(undefined);
    }

    function nearest(event) {
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      let best = -1;
      let least = REACH * REACH;
      marks.forEach(([x, y], index) => {
        const distance = (x - point.x) ** 2 + (y - point.y) ** 2;
        if (distance < least) { least = distance; best = index; }
      });
      return best;
    }

    svg.addEventListener("pointermove", (event) => {
      if (pinned) { return; }
      const index = nearest(event);
      if (index >= 0) { show(index); } else { clear(); }
    });
    svg.addEventListener("pointerleave", () => { if (!pinned && document.activeElement !== box) { clear(); } });
    svg.addEventListener("click", (event) => {
      const index = nearest(event);
      if (index < 0 || (pinned && index === current)) { clear(); return; }
      show(index);
      pinned = true;
    });
    box.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: marks.length - 1 };
      if (event.key === "Escape") { clear(); }
      if (!(event.key in moves)) { return; }
      event.preventDefault();
      show(moves[event.key]);
    });
    box.addEventListener("blur", () => { if (!pinned) { clear(); } });
    box.tabIndex = 0;
    readout.hidden = false;

    return {
      find: (row) => marks.findIndex((mark) => mark[3] === row),
      pin: (index) => { show(index); pinned = true; },
      clear,
    };
  }

  // A row of a table of rows: pressing its name rings the same row in the figures.
  function asButton(cell) {
    const row = Number(cell.dataset.row);
    const found = plots.map((plot) => [plot, plot.find(row)]).filter(([, index]) => index >= 0);
    if (!found.length) { return; }
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = cell.textContent;
    button.title = "Show this row in the figure";
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      const pressed = button.getAttribute("aria-pressed") === "true";
      found.forEach(([plot, index]) => { if (pressed) { plot.clear(); } else { plot.pin(index); } });
    });
    cell.replaceChildren(button);
  }

  // Tint the table rows that stand for the row being read.
  function choose(row) {
    document.querySelectorAll("th[data-row]").forEach((cell) => {
      const chosen = row !== undefined && Number(cell.dataset.row) === row;
      cell.parentElement.classList.toggle("chosen", chosen);
      const button = cell.querySelector("button");
      if (button) { button.setAttribute("aria-pressed", String(chosen)); }
    });
  }
})();
