'use strict';
// Draws the report from the JSON in #data. Strings of the data reach the page as text nodes only, and plots through
// plotText(), because Plotly reads markup in its labels.

const data = JSON.parse(document.getElementById('data').textContent);
const results = [['o', 'O'], ['dq', 'dQ'], ['dk', 'dK'], ['dv', 'dV']];
const symbols = ['circle', 'square', 'diamond', 'triangle-up'];
const state = {
  group: null,
  octaves: null
};

window.addEventListener('error', (event) => {
  document.querySelector('main').prepend(
      element('p', {class: 'banner'}, `This page could not be drawn: ${event.message}`));
});

// ---- Text ----

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

const byId = (id) => document.getElementById(id);
const baseName = (path) => path.split(/[\\/]/).pop();
const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);
const shorten = (text, length) => (text.length > length ? text.slice(0, length - 1) + '…' : text);
const superscript = (number) => String(number).replace('-', '−');

function plotText(text) {
  return shorten(text, 24).replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
}

function short(value, digits = 3) {
  if (value === undefined) return '–';
  if (!isNumber(value)) return 'not finite';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(digits - 1);
  return size >= 10 ** digits ? count(Math.round(value)) : value.toPrecision(digits);
}

function fixed(value, digits) {
  if (value === undefined) return '–';
  return isNumber(value) ? value.toFixed(digits) : 'not finite';
}

function percent(value) {
  if (!isNumber(value)) return fixed(value, 0);
  if (value === 0) return '0 %';
  return value < 0.0001 ? '< 0.01 %' : `${(100 * value).toFixed(value < 0.1 ? 2 : 1)} %`;
}

const count = (value) => (isNumber(value) ? value.toLocaleString('en') : fixed(value, 0));

// ---- Which results are shown ----

function problemText(problem) {
  const heads =
      problem.heads === problem.kv_heads ? `${problem.heads} heads` : `${problem.heads} heads on ${problem.kv_heads}`;
  const documents = `${count(problem.documents)} document${problem.documents === 1 ? '' : 's'}`;
  return `${count(problem.tokens)} tokens in ${documents}, ${heads} of ${problem.head_dim}, ${
      problem.causal ? 'causal' : 'not causal'}`;
}

const groupOf = (result) => baseName(result.input);
const groups = [...new Set([...data.runs, ...data.audits].sort((a, b) => a.order - b.order).map(groupOf))];
const inGroup = (result) => groupOf(result) === state.group;

// Names, made unique where a recipe was run twice.
function labelled(items, nameOf) {
  const seen = new Map();
  for (const item of items) seen.set(nameOf(item), (seen.get(nameOf(item)) || 0) + 1);
  const used = new Set();
  return items.map((item) => {
    let label = seen.get(nameOf(item)) > 1 ? `${nameOf(item)} (${baseName(item.file)})` : nameOf(item);
    for (let n = 2; used.has(label); ++n) label = `${nameOf(item)} #${n}`;
    used.add(label);
    return {...item, label};
  });
}

const shownRuns = () => labelled(data.runs.filter(inGroup), (run) => run.recipe);
const shownAudits = () => labelled(
    data.audits.filter(inGroup).flatMap((audit) => audit.recipes.map((recipe) => ({...recipe, file: audit.file}))),
    (recipe) => recipe.name);

// ---- Tables and plots ----

const cell = (text, kind = '', tag = 'td') => ({text, kind, tag});
const textCell = (text, kind = '') => cell(text, `text ${kind}`);

function drawTable(id, head, body) {
  const row = (cells) => element('tr', {}, ...cells.map((one) => {
    const attributes = {class: one.kind || ''};
    if (one.columns) attributes.colspan = one.columns;
    if (one.rows) attributes.rowspan = one.rows;
    if (one.side) attributes.title = one.text;
    if (one.tag === 'th') attributes.scope = one.columns ? 'colgroup' : one.side ? 'row' : 'col';
    return element(one.tag || 'td', attributes, one.text);
  }));
  byId(id).replaceChildren(
      element('table', {}, element('thead', {}, ...head.map(row)), element('tbody', {}, ...body.map(row))));
}

const heading = (text, extra = {}) => ({text, tag: 'th', ...extra});
const rowName = (text) => ({text, tag: 'th', side: true});

function verdictBadge(audit) {
  if (!audit) return '–';
  const text = audit.holds ? '✓ holds' : '✗ broken';
  return element('span', {class: `verdict ${audit.holds ? 'good' : 'bad'}`}, text);
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function axis(title, more = {}) {
  return {
    title: {text: title, standoff: 8},
    gridcolor: color('line'),
    linecolor: color('quiet'),
    zeroline: false,
    automargin: true,
    fixedrange: true,
    ...more
  };
}

function plotTitle(text) {
  return {
    text,
    x: 0,
    xref: 'paper',
    xanchor: 'left',
    y: 1,
    yref: 'container',
    yanchor: 'top',
    pad: {t: 8},
    font: {size: 15}
  };
}

// A dashed line over the plot's whole height.
function upright(x) {
  return {
    type: 'line',
    x0: x,
    x1: x,
    yref: 'paper',
    y0: 0,
    y1: 1,
    line: {color: color('quiet'), width: 1.5, dash: 'dash'}
  };
}

function drawPlot(target, traces, layout) {
  const base = {
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: color('panel'),
    dragmode: false,
    margin: {l: 10, r: 14, t: 34, b: 10},
    font: {color: color('text'), size: 13, family: getComputedStyle(document.body).fontFamily},
    legend: {
      orientation: 'h',
      traceorder: 'normal',
      x: 0,
      y: 1,
      xanchor: 'left',
      yanchor: 'bottom',
      itemclick: false,
      itemdoubleclick: false
    },
    hoverlabel: {align: 'left'}
  };
  return Plotly.react(target, traces, {...base, ...layout}, {displayModeBar: false, responsive: true});
}

// A row of the plot for each label, first on top; rows are numbers, because labels may be shortened to the same text.
function rowAxis(labels) {
  return {
    type: 'linear',
    tickmode: 'array',
    tickvals: labels.map((_, i) => i),
    ticktext: labels.map(plotText),
    range: [labels.length - 0.5, -0.5],
    showgrid: false,
    zeroline: false,
    automargin: true,
    fixedrange: true,
    ticklabelstandoff: 6
  };
}

function stripes(labels) {
  return labels.map((_, i) => i).filter((i) => i % 2 === 1).map((i) => ({
                                                                  type: 'rect',
                                                                  xref: 'paper',
                                                                  x0: 0,
                                                                  x1: 1,
                                                                  y0: i - 0.5,
                                                                  y1: i + 0.5,
                                                                  layer: 'below',
                                                                  line: {width: 0},
                                                                  fillcolor: color('line'),
                                                                  opacity: 0.35
                                                                }));
}

const rowHeight = (labels, each) => 110 + each * Math.max(labels.length, 1);

function sayEmpty(id, text) {
  const target = byId(id);
  if (target.data) Plotly.purge(target);
  target.replaceChildren(element('p', {class: 'empty'}, text));
}

const needRun = 'None of the files has this: add those of `mxflash run IN --recipe NAME --check --json FILE`.';
const needAudit = 'None of the files has this: add that of `mxflash audit IN --json FILE`.';

// ---- Sections ----

function drawAccuracyPlot(runs) {
  const rows = runs.filter((run) => run.accuracy);
  if (!rows.length) return sayEmpty('accuracy-plot', needRun);
  // Zero has no place on a log axis: it is drawn at this, and so is anything below.
  const least = 1e-10;
  const traces = results.map(([key, name], index) => {
    const given = rows.map((run, y) => ({y, result: run.accuracy[key], run}))
                      .filter((row) => row.result && isNumber(row.result.cosine));
    return {
      type: 'scatter',
      mode: 'markers',
      name,
      x: given.map((row) => Math.max(1 - row.result.cosine, least)),
      y: given.map((row) => row.y + 0.18 * (index - 1.5)),
      text: given.map((row) => `${plotText(row.run.label)}, ${name}<br>cosine ${row.result.cosine.toFixed(6)}`),
      hovertemplate: '%{text}<br>1 − cosine %{x:.2e}<extra></extra>',
      marker: {
        symbol: symbols[index],
        size: 10,
        color: color(`series-${index + 1}`),
        line: {width: 1, color: color('page')}
      }
    };
  });
  const labels = rows.map((run) => run.label);
  // Whole decades, so that there are two grid lines at least.
  const levels = traces.flatMap((trace) => trace.x).map(Math.log10);
  const range =
      levels.length ? [Math.floor(Math.min(...levels)) - 0.05, Math.ceil(Math.max(...levels)) + 0.05] : [-7, 0];
  drawPlot('accuracy-plot', traces, {
    height: rowHeight(labels, 34),
    shapes: stripes(labels),
    yaxis: rowAxis(labels),
    xaxis: axis('1 − cosine (log scale, no unit)', {type: 'log', range, dtick: 1, exponentformat: 'power'})
  });
}

function drawAccuracyTable(runs, audits) {
  if (!runs.length) return sayEmpty('accuracy-table', needRun);
  const four = (title) => heading(title, {kind: 'group', columns: 4});
  const two = (title) => heading(title, {kind: 'group', columns: 2});
  const names = results.map(([, name], i) => heading(name, {kind: i ? '' : 'first'}));
  const pairOf = (a, b) => [heading(a, {kind: 'first'}), heading(b)];
  const head = [
    [
      heading('Recipe', {rows: 2, kind: 'text'}), heading('Audit', {rows: 2, kind: 'text'}), four('Cosine'),
      four('Relative L2 error'), four('Largest absolute error'), two('Row sum'), two('Flushed to 0')
    ],
    [...names, ...names, ...names, ...pairOf('mean', 'least'), ...pairOf('P', 'dS')]
  ];
  const measure = (run, field, format) => results.map(([key], i) => {
    const result = run.accuracy && run.accuracy[key];
    return cell(result ? format(result[field]) : '–', i ? '' : 'first');
  });
  const body = runs.map((run) => {
    const sum = run.row_sum || {};
    const flushed = run.flushed || {};
    return [
      rowName(run.label), textCell(verdictBadge(audits.find((audit) => audit.name === run.recipe))),
      ...measure(run, 'cosine', (v) => fixed(v, 6)), ...measure(run, 'relative_l2', short),
      ...measure(run, 'max_abs', (v) => short(v, 2)), cell(fixed(sum.effective_mean, 4), 'first'),
      cell(fixed(sum.effective_min, 4)), cell(percent(flushed.p), 'first'), cell(percent(flushed.ds))
    ];
  });
  drawTable('accuracy-table', head, body);
}

function drawVerdicts(audits) {
  if (!audits.length) return sayEmpty('verdict-table', needAudit);
  const part = (title) => heading(title, {kind: 'group', columns: 4});
  const columns =
      [heading('claim', {kind: 'text first'}), heading('leaks'), heading('largest change'), heading('reach, tokens')];
  const head = [
    [
      heading('Recipe', {rows: 2, kind: 'text'}), heading('Verdict', {rows: 2, kind: 'text'}), part('Forward (O, LSE)'),
      part('Backward (dQ)'), heading('Other documents, leaks', {rows: 2, kind: 'group'}),
      heading('Row-sum error', {rows: 2, kind: 'group'}), heading('In words', {rows: 2, kind: 'text first'})
    ],
    [...columns, ...columns]
  ];
  const summary = (audit, direction) => {
    const found = audit[direction];
    if (!found || !found.probes) return [textCell('–', 'first'), cell('–'), cell('–'), cell('–')];
    return [
      textCell(audit.claims[direction], 'first'), cell(`${count(found.leaks)} of ${count(found.probes)}`),
      cell(found.leaks ? short(found.max_relative_change) : '–'), cell(found.leaks ? count(found.reach_tokens) : '–')
    ];
  };
  drawTable(
      'verdict-table', head,
      audits.map(
          (audit) =>
              [rowName(audit.label), textCell(verdictBadge(audit)), ...summary(audit, 'forward'),
               ...summary(audit, 'backward'),
               cell(
                   audit.documents.probes ? `${count(audit.documents.leaks)} of ${count(audit.documents.probes)}` : '–',
                   'first'),
               cell(short(audit.row_sum_error), 'first'), textCell(audit.verdict || '', 'first long')]));
  const skipped = data.audits.filter(inGroup).flatMap((audit) => audit.skipped || []);
  byId('skipped').replaceChildren(
      ...skipped.map((one) => element('p', {}, element('strong', {}, `Not audited: ${one.name}. `), one.reason)));
}

// Examples by cell of `size` x `size` tokens, the largest change of each.
function leakCells(examples, size, extent) {
  const cells = Math.ceil(extent / size);
  const z = Array.from({length: cells}, () => Array(cells).fill(null));
  const text = z.map((row) => row.map(() => ''));
  for (const leak of examples) {
    const row = Math.floor(leak.position / size);
    const column = Math.floor(leak.perturbed / size);
    // A change that is not finite counts as the largest.
    const level = isNumber(leak.change) ? Math.log10(leak.change) : Infinity;
    if (!z[row] || z[row][column] === undefined || (z[row][column] !== null && z[row][column] >= level)) continue;
    z[row][column] = level;
    text[row][column] =
        `position ${leak.position} moved by ${short(leak.change)}<br>when ${plotText(leak.tensor)} from ` +
        `${leak.perturbed} on changed (${plotText(leak.perturbation)})<br>document ${leak.document}, head ${leak.head}`;
  }
  return {z, text};
}

function leakGrid(examples) {
  const extent = examples.reduce((most, leak) => Math.max(most, leak.position + 1, leak.perturbed + 1), 32);
  let size = 32;
  while (extent / size > 48) size *= 2;
  const levels = examples.map((leak) => leak.change).filter((change) => isNumber(change) && change > 0).map(Math.log10);
  const low = levels.reduce((least, level) => Math.min(least, Math.floor(level)), levels.length ? Infinity : -1);
  const high = levels.reduce((most, level) => Math.max(most, Math.ceil(level)), levels.length ? -Infinity : 0);
  return {size, extent: Math.ceil(extent / size) * size, low, high: Math.max(high, low + 1)};
}

function drawLeakPanel(parent, audit, examples, grid) {
  const plot = element('div', {class: 'plot'});
  parent.append(element(
      'div', {class: 'panel'}, element('h4', {}, audit.label), element('p', {class: 'quiet'}, audit.note), plot));
  const {z, text} = leakCells(examples, grid.size, grid.extent);
  const centers = z.map((_, i) => (i + 0.5) * grid.size);
  const capped = z.map((row) => row.map((level) => (level === null ? null : Math.min(level, grid.high))));
  const trace = {
    type: 'heatmap',
    x: centers,
    y: centers,
    z: capped,
    text,
    hovertemplate: '%{text}<extra></extra>',
    hoverongaps: false,
    xgap: 1,
    ygap: 1,
    zmin: grid.low,
    zmax: grid.high,
    showscale: false,
    colorscale: [[0, color('leak-low')], [0.5, color('leak-middle')], [1, color('leak-high')]]
  };
  const range = [0, grid.extent];
  const line = {
    type: 'line',
    x0: 0,
    y0: 0,
    x1: grid.extent,
    y1: grid.extent,
    layer: 'below',
    line: {color: color('quiet'), width: 1, dash: 'dash'}
  };
  drawPlot(plot, [trace], {
    height: 250,
    margin: {l: 8, r: 10, t: 8, b: 8},
    shapes: [line],
    font: {color: color('text'), size: 11, family: getComputedStyle(document.body).fontFamily},
    xaxis: axis('changed from this token on', {range, showgrid: false, nticks: 5}),
    yaxis: axis('earlier token', {range, showgrid: false, nticks: 5})
  });
}

const leaksOf = (audit, direction) => (audit.examples || []).filter((leak) => leak.kind === direction);

function drawLeakDirection(audits, direction, grid) {
  const target = byId(`leak-${direction}`);
  for (const plot of target.querySelectorAll('.plot')) Plotly.purge(plot);
  target.replaceChildren();
  const probed = audits.filter((audit) => audit[direction] && audit[direction].probes);
  const exact = probed.filter((audit) => !audit[direction].leaks);
  const leaking = probed.filter((audit) => audit[direction].leaks);
  if (exact.length) {
    target.append(element(
        'p', {class: 'exact'}, element('strong', {}, '✓ Exact, nothing moved: '),
        exact.map((audit) => audit.label).join(', ')));
  }
  const panels = element('div', {class: 'panels'});
  target.append(panels);
  for (const audit of leaking) {
    const found = audit[direction];
    const note = `claims ${audit.claims[direction]}; ${found.leaks} of ${found.probes} probes, up to ${
                     short(found.max_relative_change)}, ` +
        `${found.reach_tokens} tokens back`;
    drawLeakPanel(panels, {label: audit.label, note}, leaksOf(audit, direction), grid);
  }
  if (!probed.length)
    target.append(element('p', {class: 'empty'}, audits.length ? 'No recipe was probed here.' : needAudit));
}

function drawLeaks(audits) {
  const grid = leakGrid(audits.flatMap((audit) => [...leaksOf(audit, 'forward'), ...leaksOf(audit, 'backward')]));
  const scale = element(
      'div', {class: 'scale'}, 'Largest change, against the row\'s largest value:',
      element('span', {}, '10', element('sup', {}, superscript(grid.low))), element('span', {class: 'bar'}),
      element('span', {}, '10', element('sup', {}, superscript(grid.high))));
  byId('leak-scale')
      .replaceChildren(...(
          audits.length ?
              [
                scale,
                element(
                    'p', {class: 'quiet'},
                    `One cell is ${grid.size} x ${
                        grid.size} tokens; positions count from the start of their document. All panels share axes and colours.`)
              ] :
              []));
  drawLeakDirection(audits, 'forward', grid);
  drawLeakDirection(audits, 'backward', grid);
}

function drawRowSums(runs) {
  const rows =
      runs.filter((run) => run.row_sum && isNumber(run.row_sum.effective_mean) && isNumber(run.row_sum.effective_min));
  if (!rows.length) return sayEmpty('row-sum-plot', needRun);
  const labels = rows.map((run) => run.label);
  const all = rows.flatMap((run) => [run.row_sum.effective_mean, run.row_sum.effective_min]);
  const low = Math.min(...all, 1);
  const high = Math.max(...all, 1);
  const margin = Math.max(0.05 * (high - low), 0.002);
  const marks = (field, name, symbol, index) => ({
    type: 'scatter',
    mode: 'markers',
    name,
    x: rows.map((run) => run.row_sum[field]),
    y: labels.map((_, i) => i),
    text: labels.map(plotText),
    hovertemplate: `%{text}<br>${name} %{x:.6f}<extra></extra>`,
    marker:
        {symbol, size: index === 1 ? 10 : 11, color: color(`series-${index}`), line: {width: 1, color: color('page')}}
  });
  const links = rows.map((run, i) => ({
                           type: 'line',
                           x0: run.row_sum.effective_min,
                           x1: run.row_sum.effective_mean,
                           y0: i,
                           y1: i,
                           layer: 'below',
                           line: {color: color('quiet'), width: 2}
                         }));
  drawPlot(
      'row-sum-plot',
      [marks('effective_min', 'worst row', 'diamond', 2), marks('effective_mean', 'mean of rows', 'circle', 1)], {
        height: rowHeight(labels, 28),
        shapes: [...stripes(labels), ...links, upright(1)],
        yaxis: rowAxis(labels),
        xaxis: axis('sum of a row\'s weights (no unit; exact: 1)', {range: [low - margin, high + margin], nticks: 7})
      });
}

function drawOctaves(id, name, bins, flushedShare) {
  const sorted = [...bins].filter(([octave, all]) => isNumber(octave) && isNumber(all)).sort((a, b) => a[0] - b[0]);
  const total = sorted.reduce((sum, bin) => sum + bin[1], 0);
  if (!total)
    return sayEmpty(
        id, `No ${name} here: ${name === 'dS' ? 'the recipe has no backward, or none was run.' : 'none was counted.'}`);
  if (!byId(id).data) byId(id).replaceChildren();
  // The far tail would squeeze the rest: it is told in words.
  let tail = 0;
  let first = 0;
  while (tail + sorted[first][1] < 0.002 * total) tail += sorted[first++][1];
  const bars = sorted.slice(first);
  const part = (title, share, mark) => ({
    type: 'bar',
    name: title,
    x: bars.map((bin) => bin[0]),
    y: bars.map((bin) => 100 * share(bin) / total),
    marker: mark,
    hovertemplate: `%{y:.2f} % ${title}, at 2<sup>%{x}</sup><extra></extra>`
  });
  const ends = [bars[0][0], bars[bars.length - 1][0]];
  const step = Math.max(1, Math.ceil((ends[1] - ends[0]) / 8 / 5) * 5);
  const ticks = [];
  for (let octave = Math.ceil(ends[0] / step) * step; octave <= ends[1]; octave += step) ticks.push(octave);
  const further = tail ? `; ${percent(tail / total)} smaller than shown` : '';
  drawPlot(
      id,
      [
        part('kept', (bin) => bin[1] - bin[2], {color: color('series-1')}), part('flushed to 0', (bin) => bin[2], {
          color: color('series-2'),
          pattern: {shape: '/', size: 7, solidity: 0.3, fgcolor: color('page'), bgcolor: color('series-2')}
        })
      ],
      {
        barmode: 'stack',
        bargap: 0.12,
        height: 340,
        margin: {l: 10, r: 14, t: 66, b: 10},
        title: plotTitle(`${name}: ${percent(flushedShare)} flushed${further}`),
        xaxis: axis(
            `size of |${name}| (from 2<sup>k</sup> up to 2<sup>k+1</sup>)`,
            {tickvals: ticks, ticktext: ticks.map((k) => `2<sup>${superscript(k)}</sup>`), showgrid: false}),
        yaxis: axis(`share of non-zero ${name}, %`, {rangemode: 'tozero'})
      });
}

function drawOctaveSection(runs) {
  const rows = runs.filter((run) => run.octaves);
  if (!rows.length) {
    byId('octave-picker').replaceChildren();
    sayEmpty('octave-p', needRun);
    return sayEmpty('octave-ds', needRun);
  }
  const labels = rows.map((run) => run.label);
  if (!labels.includes(state.octaves)) state.octaves = labels.includes('mxfp8') ? 'mxfp8' : labels[0];
  const draw = () => {
    const run = rows[labels.indexOf(state.octaves)];
    const flushed = run.flushed || {};
    drawOctaves('octave-p', 'P', run.octaves.p || [], flushed.p);
    drawOctaves('octave-ds', 'dS', run.octaves.ds || [], flushed.ds);
  };
  drawPicker('octave-picker', 'Recipe', labels, state.octaves, (label) => {
    state.octaves = label;
    draw();
  });
  draw();
}

function drawScaleRules() {
  const {maxima, rules, threshold} = data.scale_rules;
  const kinds =
      [['uniform', 'Elements evenly spread'], ['normal', '32 normal values'], ['largest', 'Largest element alone']];
  // The rules agree on much of the octave: thin lines lie over thick ones.
  const styles = [['ceil', 2, {width: 7}, 0.55], ['floor', 3, {width: 3, dash: 'dot'}, 1], ['uos', 1, {width: 2}, 1]];
  for (const [kind, title] of kinds) {
    const traces = styles.map(([rule, series, line, opacity]) => ({
                                type: 'scatter',
                                mode: 'lines',
                                name: rule,
                                x: maxima,
                                y: rules[rule][kind],
                                opacity,
                                line: {...line, color: color(`series-${series}`)},
                                hovertemplate: `${rule}: %{y:.5f}<extra></extra>`
                              }));
    drawPlot(`rule-${kind}`, traces, {
      height: 340,
      margin: {l: 10, r: 10, t: 66, b: 10},
      hovermode: 'x',
      title: plotTitle(title),
      shapes: [upright(threshold)],
      annotations: [{
        x: threshold,
        yref: 'paper',
        y: 0.99,
        yanchor: 'top',
        xanchor: 'right',
        xshift: -3,
        text: String(threshold),
        showarrow: false,
        font: {color: color('quiet')}
      }],
      xaxis: axis('block maximum, in units of the scale', {range: [4, 8], dtick: 1}),
      yaxis: axis('mean squared relative error', {rangemode: 'tozero', nticks: 6})
    });
  }
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const names = ['floor', 'ceil', 'uos'];
  drawTable(
      'rule-table',
      [[heading('Mean over the octave, the lowest in bold', {kind: 'text'}), ...names.map((name) => heading(name))]],
      kinds.map(([kind, title]) => {
        const means = names.map((name) => mean(rules[name][kind]));
        const least = Math.min(...means);
        return [
          {...rowName(title), kind: 'wrap'},
          ...means.map((value) => cell(value === least ? element('strong', {}, short(value, 4)) : short(value, 4)))
        ];
      }));
}

function drawBenches() {
  if (!data.benches.length)
    return sayEmpty('bench-tables', 'None of the files has this: add that of `mxflash bench --json FILE`.');
  const time = (samples) =>
      [cell(samples ? short(samples.median_ms) : '–', 'first'),
       cell(samples ? `${short(samples.min_ms)} to ${short(samples.max_ms)}` : '–'),
       cell(samples ? short(samples.gflops_per_second) : '–')];
  const columns = [heading('median, ms', {kind: 'first'}), heading('least to most'), heading('GFLOP/s')];
  const head = [
    [
      ...['Recipe', 'Workload', 'Engine', 'Problem', 'Answer'].map((title) => heading(title, {rows: 2, kind: 'text'})),
      heading('Forward', {kind: 'group', columns: 3}), heading('Backward', {kind: 'group', columns: 3})
    ],
    [...columns, ...columns]
  ];
  byId('bench-tables').replaceChildren();
  data.benches.forEach((bench, index) => {
    const {machine, method} = bench;
    const table = element('div', {class: 'table', id: `bench-${index}`});
    byId('bench-tables')
        .append(
            element(
                'p', {},
                `${machine.cpu || 'Unknown processor'}, ${machine.cores} cores at ${
                    machine.clock_mhz || 'unknown'} MHz, ${method.threads} threads; ` +
                    `${method.repeats} timed calls after ${method.warmup} to warm up, quantization included; compiler ${
                        machine.compiler}.`),
            table);
    drawTable(
        table.id, head,
        bench.benchmarks.map(
            (one) =>
                [rowName(one.recipe), textCell(one.workload), textCell(one.engine.name),
                 textCell(problemText(one.problem), 'long'),
                 textCell(one.check.right ? '✓ right' : '✗ wrong: not timed'), ...time(one.forward),
                 ...time(one.backward)]));
  });
}

function drawInputs() {
  const run = (result) =>
      [textCell('run'), textCell(result.recipe), textCell(result.engine.name),
       textCell(problemText(result.problem), 'long')];
  const audit = (result) =>
      [textCell('audit'), textCell(`${result.recipes.length} recipes`), textCell(result.engine.name),
       textCell(problemText(result.problem), 'long')];
  const times = (result) => ['quantize', 'forward', 'backward'].map(
      (part) => cell(result.time_ms ? short(result.time_ms[part]) : '–'));
  const bench =
      (result) => [textCell('bench'), textCell(`${result.benchmarks.length} timings`), textCell('–'), textCell('–')];
  const kinds = [[data.runs, run], [data.audits, audit], [data.benches, bench]];
  const rows = kinds.flatMap(([all, cells]) => all.map((result) => [result, ...cells(result)]));
  rows.sort((a, b) => a[0].order - b[0].order);
  drawTable(
      'input-table', [[
        heading('File', {kind: 'text'}), heading('Made by', {kind: 'text'}), heading('Recipe', {kind: 'text'}),
        heading('Engine', {kind: 'text'}), heading('Problem', {kind: 'text'}), heading('Quantize, ms'),
        heading('Forward, ms'), heading('Backward, ms')
      ]],
      rows.map(([result, ...cells]) => [rowName(result.file), ...cells, ...times(result)]));
}

// ---- Page ----

function drawPicker(id, title, labels, chosen, onChoice) {
  const select =
      element('select', {}, ...labels.map((label) => element('option', label === chosen ? {selected: ''} : {}, label)));
  select.addEventListener('change', () => onChoice(labels[select.selectedIndex]));
  byId(id).replaceChildren(element('label', {}, title, select));
}

function drawHeader() {
  const files = data.runs.length + data.audits.length + data.benches.length;
  byId('made').textContent = `Made by mxflash ${data.version} on ${data.created} from ${files} file${
      files === 1 ? '' : 's'}; the list is at the end.`;
  if (groups.length > 1) {
    drawPicker('problem', 'Results of input', groups, state.group, (group) => {
      state.group = group;
      drawResults();
    });
  } else if (groups.length) {
    const first = [...data.runs, ...data.audits][0];
    byId('problem').replaceChildren(
        element('p', {}, element('strong', {}, 'Input: '), `${groups[0]} (${problemText(first.problem)})`));
  }
}

function drawResults() {
  const runs = shownRuns();
  const audits = shownAudits();
  drawAccuracyPlot(runs);
  drawAccuracyTable(runs, audits);
  drawVerdicts(audits);
  drawLeaks(audits);
  drawRowSums(runs);
  drawOctaveSection(runs);
}

function drawPage() {
  drawResults();
  drawScaleRules();
}

state.group = groups.length ? groups[0] : null;
drawHeader();
drawBenches();
drawInputs();
drawPage();
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawPage);
document.documentElement.dataset.drawn = 'yes';
