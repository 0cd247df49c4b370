// Charts next to the list: the series of the selected runs, or of the first that are listed.
import { createPanelMenu } from 'chart_menu'
import { arrangementOf, SEVERAL_RUNS } from 'chart_preferences'
import { count } from 'formats'
import { inTurn } from 'http'
import { isZoomed, resetZoom, takeAxes } from 'panel_axes'
import { placesOf, strokes } from 'run_colors'
import { createRunPanel } from 'run_panels'
import { seriesOf } from 'series_of_runs'
import { createToolbar } from 'toolbar'
import { readView, writeView } from 'url_state'

/** @param {Found} section @param {Found} list */
export const createListCharts = (section, list) => {
  const view = readView(section)
  const { arrangement, keep } = arrangementOf(section, SEVERAL_RUNS)
  takeAxes(view, arrangement)
  const toolbar = createToolbar(section, view, arrangement, {
    onArrange: keep,
    onChange: (field) => changeView(field === 'x'),
  })
  const most = Number(section.dataset.most)
  const isScaled = ({ id }) => list.querySelector(`tr[data-key="${id}"][data-scaled]`)
  const panels = [...section.querySelectorAll('[data-row]')].map((element) =>
    createRunPanel(element, {
      view,
      runsOf: (name, runs) => (name === 'scale' ? runs.filter(isScaled) : runs),
      onPoint: (x) => {
        for (const panel of panels) panel.point(x)
      },
      onView: (isRange) => changeView(isRange),
    }),
  )
  const panelOf = (row) => panels.find(({ name }) => name === row)
  createPanelMenu(
    section,
    'runs',
    {
      panelOf,
      mode: () => view.x,
      picture: (file, format, row) => panelOf(row)?.savePicture(file, format),
      view,
      onAxis: () => changeView(false),
    },
    arrangement,
    keep,
  )
  const { points, fetchSeries } = seriesOf(
    section.dataset.api,
    view,
    () => panels.map(({ name }) => name),
    () => draw(),
  )
  /** The drawn runs, in the order of the list. @type {string[]} */
  let ids = []
  let places = placesOf(ids)

  const boxes = () => [...list.querySelectorAll('[name=run]')]
  const labelOf = (id) => `${list.querySelector(`tr[data-key="${id}"] .name a`)?.title ?? 'run'} ${id}`
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
    section.querySelector('[data-shown]').textContent =
      `${count(ids.length)} of ${count(Number(section.dataset.totalRuns))} runs`
    section.querySelector('[data-chart-legend]').replaceChildren(
      ...ids.map((id) => {
        const item = document.createElement('li')
        item.innerHTML = `<svg class="${strokes(places.get(id) ?? 0)}" viewBox="0 0 22 8" aria-hidden="true"><path d="M0 4h22"/></svg>`
        item.append(Object.assign(document.createElement('span'), { textContent: labelOf(id) }))
        item.title = labelOf(id)
        return item
      }),
    )
  }

  const draw = () => {
    toolbar.show()
    section.querySelector('[data-reset-zoom]').hidden = !isZoomed(view, arrangement)
    const runs = ids.flatMap((id) => {
      const known = points.get(id)
      return known?.hasAxis(view.x)
        ? [{ id, label: labelOf(id), place: places.get(id) ?? 0, group: null, points: known }]
        : []
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

  section.querySelector('[data-reset-zoom]').addEventListener('click', () => {
    resetZoom(view, arrangement)
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
