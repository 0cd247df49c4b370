// Charts next to the list: the series of the selected runs, or of the first that are listed.
import { between } from 'axis'
import { painter, zoomed } from 'charts'
import { comparisonFigure } from 'comparison'
import { place, pointedAt, snapped } from 'crosshair'
import { count } from 'formats'
import { inTurn } from 'http'
import { placesOf, strokes } from 'run_colors'
import { seriesOf } from 'series_of_runs'
import { readView, writeView } from 'url_state'

const MARGIN = { l: 56, r: 14, t: 6, b: 26 }
/** Panels in which each skipped step has a tick. */
const WITH_SKIPS = ['loss', 'scale']

/** @param {Found} section @param {Found} list */
export const createListCharts = (section, list) => {
  const view = readView(section)
  const most = Number(section.dataset.most)
  const panels = [...section.querySelectorAll('[data-row]')].map((element) => createPanel(element))
  const { points, fetchSeries } = seriesOf(section.dataset.api, view, () => panels.map(({ name }) => name), () => draw())
  /** The drawn runs, in the order of the list. @type {string[]} */
  let ids = []
  let places = placesOf(ids)

  const boxes = () => [...list.querySelectorAll('[name=run]')]
  const labelOf = (id) => list.querySelector(`tr[data-key="${id}"] .name a`)?.title ?? `run ${id}`
  const chosen = () => {
    const ticked = boxes().filter(({ checked }) => checked)
    return (ticked.length ? ticked : boxes()).slice(0, most).map(({ value }) => value)
  }

  /** The list's swatches have the colours of the lines, others their own. */
  const paint = () => {
    for (const swatch of list.querySelectorAll('.swatch')) {
      const drawn = places.get(swatch.closest('tr').dataset.key)
      const name = `swatch line-${drawn === undefined ? swatch.dataset.own : drawn % 10}`
      if (swatch.className !== name) swatch.className = name
    }
  }
  const showLegend = () => {
    section.querySelector('[data-shown]').textContent = `${count(ids.length)} of ${count(Number(section.dataset.totalRuns))} runs`
    section.querySelector('[data-chart-legend]').replaceChildren(...ids.map((id) => {
      const item = document.createElement('li')
      item.innerHTML = `<svg class="${strokes(places.get(id) ?? 0)}" viewBox="0 0 22 8" aria-hidden="true"><path d="M0 4h22"/></svg>`
      item.append(Object.assign(document.createElement('span'), { textContent: labelOf(id) }))
      item.title = labelOf(id)
      return item
    }))
  }

  function createPanel(element) {
    const plot = element.querySelector('.plot')
    const { row: name, title } = element.dataset
    const readout = element.querySelector('[data-pointed]')
    /** @type {any} */
    let drawn = null
    /** Told lines by number of the trace. @type {any[]} */
    let lines = []
    const compose = (wanted, colors) => {
      const runs = name === 'scale' ? wanted.runs.filter(({ id }) => list.querySelector(`tr[data-key="${id}"][data-scaled]`)) : wanted.runs
      const figure = comparisonFigure({ ...wanted, runs, rows: [{ name, title }] }, colors, plot.clientWidth)
      const { layout } = figure
      const kept = figure.told.filter(({ trace }) => WITH_SKIPS.includes(name) || trace.yaxis !== 'y')
      lines = kept
      if (!WITH_SKIPS.includes(name)) layout.yaxis2.domain = [0, 1]
      Object.assign(layout, { margin: MARGIN, height: plot.clientHeight, annotations: [] })
      if (layout.yaxis2.type === 'log' && name !== 'scale') {
        const values = kept.flatMap(({ trace }) => (trace.yaxis === 'y' ? [] : trace.y)).filter((y) => y > 0)
        const dtick = between(values)
        Object.assign(layout.yaxis2, { nticks: undefined, dtick }, typeof dtick === 'number' && { tickformat: undefined, exponentformat: 'power' })
      }
      Object.assign(layout.xaxis, { title: undefined, showspikes: false })
      const own = kept.filter(({ steps, trace }) => steps.length && trace.hoverinfo !== 'skip')
      element.toggleAttribute('data-blank', !own.length)
      drawn = {
        lines: own.map(({ label, trace }) => ({ name: label, color: '', x: trace.x, y: trace.y })), marks: [],
        axis: { range: layout.xaxis.range ?? [0, 0], left: MARGIN.l, pixels: plot.clientWidth - MARGIN.l - MARGIN.r },
      }
      return { data: kept.map(({ trace }) => trace), layout, drawn: figure.drawn, isFitted: true }
    }
    const paintPlot = painter(plot, compose, () => {
      plot.on('plotly_hover', ({ points: [{ curveNumber, y }] }) => { readout.textContent = `${lines[curveNumber]?.label ?? ''} ${Number(y.toPrecision(5))}` })
      plot.on('plotly_unhover', () => { readout.textContent = '' })
      plot.on('plotly_relayout', (change) => {
        const zoom = zoomed(change, [name])
        if (!zoom) return
        if (zoom.x !== undefined) view.range = zoom.x
        const range = zoom.rows[name]
        if (range) view.rows[name] = range
        else if (range === null) delete view.rows[name]
        changeView(zoom.x !== undefined)
      })
    })
    const point = (x) => { for (const panel of panels) panel.point(x) }
    plot.addEventListener('mousemove', (event) => {
      const x = drawn && pointedAt(event, plot, drawn)
      point(x === null || !drawn ? null : snapped(drawn, x))
    })
    plot.addEventListener('mouseleave', () => point(null))
    element.querySelector('[data-full]').addEventListener('click', () => element.requestFullscreen())
    element.addEventListener('keydown', (event) => {
      if (event.key.toLowerCase() === 'f' && event.target === element && !event.ctrlKey && !event.metaKey && !event.altKey) element.requestFullscreen()
    })
    return { name, draw: paintPlot, point: (x) => place(element.querySelector('.crosshair'), drawn, x, view.x) }
  }

  const draw = () => {
    section.querySelector('[data-smooth]').textContent = String(view.smooth)
    section.querySelector('[data-reset-zoom]').hidden = !view.range && !Object.keys(view.rows).length
    const runs = ids.flatMap((id) => {
      const known = points.get(id)
      return known?.hasAxis(view.x) ? [{ id, label: labelOf(id), place: places.get(id) ?? 0, group: null, points: known }] : []
    })
    for (const panel of panels) panel.draw({ runs, view: { ...view }, band: 'range' })
  }
  const changeView = (isMore) => {
    writeView(view)
    draw()
    if (isMore) fetchSeries(ids)
  }

  /** Runs whose numbers are older than their rows. @type {Set<string>} */
  const stale = new Set()
  const refresh = inTurn(async () => {
    const missing = ids.filter((id) => !points.has(id) || stale.has(id))
    for (const id of missing) stale.delete(id)
    if (missing.length) await fetchSeries(missing)
  })
  const choose = () => {
    paint()
    const wanted = chosen()
    if (wanted.join() !== ids.join()) {
      ids = wanted
      places = placesOf(ids)
      paint()
      showLegend()
      draw()
    }
    refresh()
  }

  for (const input of section.querySelectorAll('[data-view]')) {
    const name = input.dataset.view
    if (input.type === 'radio') input.checked = view[name] === input.value
    else input.value = view[name]
    input.addEventListener('input', () => {
      view[name] = input.type === 'range' ? Number(input.value) : input.value
      if (name === 'x') view.range = null
      changeView(name === 'x')
    })
  }
  section.querySelector('[data-reset-zoom]').addEventListener('click', () => {
    view.range = null
    view.rows = {}
    changeView(true)
  })
  list.addEventListener('selection', choose)
  choose()
  return {
    /** @param {string[]} changed ids of runs whose rows were replaced */
    update: (changed) => {
      for (const id of changed) stale.add(id)
      choose()
    },
  }
}
