"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const root = document.documentElement;
  const shown = {}; // plot → which of its views
  const config = { displayModeBar: false, showTips: false, doubleClick: false };

  // A colour or font by its name in the style sheet, wherever one stands in a plot.
  function styled(value, style) {
    if (typeof value === "string" && value[0] === "@") return style.getPropertyValue("--" + value.slice(1)).trim();
    if (Array.isArray(value)) return value.map((each) => styled(each, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, styled(each, style)]));
    return value;
  }

  // A text in lines of at most so many letters, but for words that are longer.
  function wrapped(text, most) {
    return text.split(" ").reduce((lines, word) => {
      const last = lines.pop();
      return last === undefined ? [word] : last.length + 1 + word.length <= most ? [...lines, last + " " + word] : [...lines, last, word];
    }, []);
  }

  // Fewer ticks where there is less room.
  function thinned(axis, room) {
    let ticks = axis.tickvals ? axis.tickvals.map((value, n) => [value, axis.ticktext[n]]) : [];
    if (!axis.tickvals) return;
    if (axis.type !== "log") {
      axis.ticktext = axis.ticktext.map((text) => wrapped(text, Math.max(14, Math.floor(room / 17))).join("<br>"));
      return;
    }
    const [low, high] = axis.range;
    let taken = -Infinity;
    ticks = ticks.filter(([value, text]) => {
      const at = ((Math.log10(value) - low) / (high - low)) * room, half = 3.6 * text.length + 5;
      if (at - half < taken) return false;
      taken = at + half;
      return true;
    });
    axis.tickvals = ticks.map(([value]) => value);
    axis.ticktext = ticks.map(([, text]) => text);
  }

  const pen = document.createElement("canvas").getContext("2d");
  function width(text, font, bold) {
    pen.font = (bold ? "700" : "400") + " 12px " + font;
    return pen.measureText(text).width + 8;
  }
  const over = (a, b) => Math.max(0, Math.min(a[2], b[2]) - Math.max(a[0], b[0])) * Math.max(0, Math.min(a[3], b[3]) - Math.max(a[1], b[1]));

  // Each label goes to the nearest place beside its point where it covers no other label and as few points as can be.
  function placed(gd, view, style) {
    const full = gd._fullLayout, xa = full.xaxis, ya = full.yaxis, here = gd.getBoundingClientRect();
    const left = here.left + full._size.l, top = here.top + full._size.t;
    const taken = [...gd.querySelectorAll(".annotation-text-g, .legend")].map((one) => {
      const box = one.getBoundingClientRect();
      return [box.left - left, box.top - top, box.right - left, box.bottom - top];
    });
    const points = [];
    view.data.forEach((trace) => {
      if (trace.mode !== "markers") return;
      const weight = trace.marker.opacity < 0.7 ? 15 : 60;
      trace.x.forEach((x, n) => points.push([xa.d2p(x), ya.d2p(trace.y[n]), weight]));
    });
    const lines = view.data.filter((trace) => trace.mode === "lines" && trace.line.width >= 1.5).flatMap((trace) =>
      trace.x.map((x, n) => [xa.d2p(x), ya.d2p(trace.y[n])]));
    view.data.filter((trace) => trace.error_y || trace.error_x).forEach((trace) => trace.x.forEach((x, n) => {
      for (let share = 0; share <= 1; share += 0.1) {
        if (trace.error_y) lines.push([xa.d2p(x), ya.d2p(trace.y[n] - trace.error_y.arrayminus[n] + share * (trace.error_y.array[n] + trace.error_y.arrayminus[n]))]);
        if (trace.error_x) lines.push([xa.d2p(x - trace.error_x.arrayminus[n] + share * (trace.error_x.array[n] + trace.error_x.arrayminus[n])), ya.d2p(trace.y[n])]);
      }
    }));
    (view.layout.shapes || []).filter((shape) => shape.type === "line").forEach((shape) => {
      for (let share = 0; share <= 1; share += 0.01)
        lines.push(shape.xref === "paper" ? [share * xa._length, ya.d2p(shape.y0)] : [xa.d2p(shape.x0), share * ya._length]);
    });
    const font = style.getPropertyValue("--font").trim();
    return view.labels.map((label) => {
      const text = wrapped(label.text, Math.max(14, Math.floor(xa._length / 16)));
      const w = Math.max(...text.map((one) => width(one, font, label.bold))), h = 2 + 16 * text.length;
      const x = xa.d2p(label.x), y = ya.d2p(label.y), shown = text.map(escaped).join("<br>");
      let best = null;
      for (const far of [0, 14, 30, 50, 75, 105, 140, 180])
        for (const [dx, dy] of [[1, 0], [1, -1], [1, 1], [-1, 0], [-1, -1], [-1, 1], [0, -1], [0, 1]]) {
          const cx = x + dx * (w / 2 + 9 + (dy ? 0.5 : 1) * far), cy = y + dy * (h / 2 + 7 + far);
          const box = [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2];
          const outside = Math.max(0, -box[0]) + Math.max(0, box[2] - xa._length) + Math.max(0, -box[1]) + Math.max(0, box[3] - ya._length);
          const hidden = taken.reduce((sum, other) => sum + over(box, other), 0);
          const covered = points.reduce((sum, [px, py, weight]) => sum + (over(box, [px - 5, py - 5, px + 5, py + 5]) > 0 ? weight : 0), 0);
          const crossed = lines.filter(([px, py]) => over(box, [px - 1, py - 1, px + 1, py + 1]) > 0).length;
          const cost = 50 * outside + 40 * hidden + covered + 12 * crossed + far + (dy ? 3 : 0) + (dx < 0 ? 2 : 0);
          if (!best || cost < best.cost) best = { cost, box, cx, cy, far };
        }
      taken.push(best.box);
      return {
        x: xa.type === "log" ? Math.log10(label.x) : label.x, y: ya.type === "log" ? Math.log10(label.y) : label.y,
        ax: best.cx - x, ay: best.cy - y,
        showarrow: true, arrowhead: 0, arrowwidth: 1, arrowcolor: best.far ? styled("@line", style) : "rgba(0,0,0,0)",
        standoff: 6, borderpad: 1, text: label.bold ? "<b>" + shown + "</b>" : shown,
        font: { size: 12, color: styled(label.colour, style) },
      };
    });
  }
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function draw(key) {
    const gd = document.getElementById("plot-" + key), plot = plots[key], style = getComputedStyle(root);
    const view = plot.views[shown[key] || 0], { data, layout } = styled({ data: view.data, layout: view.layout }, style);
    layout.width = gd.clientWidth;
    layout.height = plot.height;
    thinned(layout.xaxis, layout.width - 70);
    thinned(layout.yaxis, layout.width - 70);
    Plotly.react(gd, data, layout, config);
    if (view.labels.length)
      Plotly.relayout(gd, { annotations: [...(layout.annotations || []), ...placed(gd, view, style)] });
    gd.dataset.width = layout.width;
  }
  const drawAll = () => Object.keys(plots).forEach(draw);

  new Set(document.querySelectorAll("button[data-plot]")).forEach((button) =>
    button.addEventListener("click", () => {
      const key = button.dataset.plot;
      shown[key] = Number(button.dataset.view);
      button.parentElement.querySelectorAll("button").forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
      draw(key);
    }));

  // Click a heading: highest first, then lowest first.
  const value = (row, n) => {
    const text = row.cells[n].textContent.trim(), figure = parseFloat(text.replace(/,/g, ""));
    return Number.isNaN(figure) ? text : figure;
  };
  document.querySelectorAll("table.sortable thead th").forEach((head) => {
    head.tabIndex = 0;
    const sort = () => {
      const body = head.closest("table").tBodies[0], n = head.cellIndex;
      const up = head.getAttribute("aria-sort") === "descending";
      head.parentElement.querySelectorAll("th").forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = (a, b) => {
        const x = value(a, n), y = value(b, n);
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1; // what has no figure goes last
        return (x < y ? 1 : x > y ? -1 : 0) * (up ? -1 : 1);
      };
      body.append(...[...body.rows].sort(order));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); }
    });
  });

  drawAll();
  root.dataset.drawn = "yes";
  let waiting = 0;
  const resized = () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() =>
      Object.keys(plots).forEach((key) => {
        const gd = document.getElementById("plot-" + key);
        if (gd.clientWidth && Number(gd.dataset.width) !== gd.clientWidth) draw(key);
      }));
  };
  const watch = new ResizeObserver(resized);
  Object.keys(plots).forEach((key) => watch.observe(document.getElementById("plot-" + key)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  // Paper is white and as wide as a page, whatever the screen is.
  addEventListener("beforeprint", () => { root.classList.add("printing"); drawAll(); });
  addEventListener("afterprint", () => { root.classList.remove("printing"); drawAll(); });
})();
