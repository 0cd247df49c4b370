// One number of each run against another, a dot a run: settings that differ, and figures. Below it
// all settings beside one of them.
import { createPlot } from 'charts'
import { strokeOf } from 'comparison'
import { escaped } from 'formats'
import { parallelFigure } from 'parallel'
import { placesOf } from 'run_colors'

const FIGURES = { 'run/step_ms': 'Time a step, ms', 'run/seconds': 'Time, s', 'run/peak_memory_bytes': 'Peak memory, bytes', seconds: 'Duration, s', loss: 'Last loss' }
const [LOG_FROM, HEIGHT] = [20, 380] // how many times the smallest the largest is, for a log axis; pixels

/** What can be drawn, by name: of each run a value. @param {any} found as /api/v1/comparison answers @returns {Map<string, any[]>} */
const columnsOf = ({ runs, differences }) => {
  const columns = new Map(Object.entries(differences))
  const add = (name, values) => { if (values.some((value) => typeof value === 'number')) columns.set(name, values) }
  const names = [...new Set(runs.flatMap(({ figures }) => Object.keys(figures)))]
  for (const name of names) {
    add(FIGURES[name] ?? name, runs.map(({ figures }) => figures[name]?.value))
    add(name === 'loss' ? 'Lowest loss' : `${name}, best`, runs.map(({ best }) => best[name]?.value))
  }
  add('Skipped steps', runs.map(({ run }) => run.skipped))
  add('Steps', runs.map(({ run }) => run.step))
  return columns
}

/** @param {any[]} values */
const axisOf = (values, title, colors) => {
  const numbers = values.filter((value) => typeof value === 'number')
  const isNumeric = numbers.length === values.filter((value) => value !== null && value !== undefined).length
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)]
  const isLog = isNumeric && low > 0 && high / low >= LOG_FROM
  const type = isLog ? 'log' : isNumeric ? 'linear' : 'category'
  return { type, title: { text: escaped(isLog ? `${title} (log)` : title), standoff: 8 }, gridcolor: colors.grid, zeroline: false, automargin: true, ...(isLog && { exponentformat: 'power' }) }
}

const word = (value) => (typeof value === 'number' || value === null || value === undefined ? value : escaped(String(value).slice(0, 40)))

const scatterFigure = ({ ids, labels, across, up, columns }, colors) => {
  const [x, y] = [across, up].map((name) => (columns.get(name) ?? []).map(word))
  const places = placesOf(ids)
  const placeOf = (id) => places.get(id) ?? 0
  const data = ids.map((id, i) => ({
    x: [x[i]], y: [y[i]], name: escaped(labels[id]), type: 'scatter', mode: 'markers', cliponaxis: false,
    marker: { size: 11, color: strokeOf(placeOf(id), colors).color, symbol: Math.floor(placeOf(id) / 10), line: { width: 1, color: colors.card } },
    hovertemplate: `%{fullData.name}<br>%{x}, %{y}<extra></extra>`,
  })).filter(({ x: [a], y: [b] }) => a !== null && a !== undefined && b !== null && b !== undefined)
  const layout = {
    margin: { l: 72, r: 24, t: 20, b: 52 }, height: HEIGHT, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet }, showlegend: false, hovermode: 'closest',
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    xaxis: axisOf(x, across, colors), yaxis: axisOf(y, up, colors),
  }
  return { data, layout, drawn: data.length }
}

/** @param {HTMLDetailsElement|null} box @param {string[]} ids @param {Record<string, string>} labels */
export const createScatter = (box, ids, labels) => {
  if (!box) return { draw: () => {}, choose: () => {} }
  const plot = createPlot(box.querySelector('[data-scatter-plot]'), scatterFigure)
  const [across, up] = ['across', 'up'].map((name) => box.querySelector(`[data-choice=${name}]`))
  const beside = createPlot(box.querySelector('[data-parallel-plot]'), parallelFigure)
  let columns = new Map()
  /** @type {string[]} */
  let settings = []
  const paint = () => {
    if (!columns.size || !box.open) return
    plot.draw({ ids, labels, columns, across: across.value, up: up.value })
    beside.draw({ ids, labels, columns, settings, up: up.value })
  }
  const choose = (choices) => {
    const names = [...columns.keys()]
    const numeric = names.find((name) => columns.get(name).every((value) => typeof value === 'number'))
    const usual = [numeric ?? names[0], names.includes('Lowest loss') ? 'Lowest loss' : names.at(-1)]
    ;[across, up].forEach((select, i) => {
      const wanted = choices[select.dataset.choice] ?? (select.value || usual[i])
      const known = [...select.options].map(({ value }) => value)
      if (known.join('\n') !== names.join('\n')) select.replaceChildren(...names.map((name) => new Option(name, name)))
      select.value = names.includes(wanted) ? wanted : usual[i]
    })
    paint()
  }
  box.addEventListener('toggle', paint)
  return {
    /** @param {any} found @param {Record<string, string>} choices of the address */
    draw: (found, choices) => {
      columns = columnsOf(found)
      settings = Object.keys(found.differences)
      if (choices.across || choices.up) box.open = true
      choose(choices)
    },
    choose,
  }
}
