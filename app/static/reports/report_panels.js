// The panels of a report and of its preview.
import { createPanelMenu } from 'chart_menu'
import { titleOf } from 'comparison'
import { placesOf } from 'run_colors'
import { createRunPanel } from 'run_panels'
import { seriesOf } from 'series_of_runs'

/** Begins a panel's drawing. @type {Map<Element, () => void>} */
const waiting = new Map()
const observer = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue
      observer.unobserve(target)
      waiting.get(target)?.()
    }
  },
  { rootMargin: '300px' },
)

/**
 * A panel, a chart a metric, which is drawn when it comes on screen.
 * @param {Found} section
 * @param {Found} report
 */
export const createReportPanel = (section, report) => {
  const { runs, x, smoothing, log } = section.dataset
  const ids = runs.split(',')
  const rows = [...section.querySelectorAll('[data-row]')]
  const names = rows.map(({ dataset }) => dataset.row)
  const isLog = log !== undefined
  /** @type {import('url_state').View} */
  const view = {
    x: /** @type {any} */ (x),
    smooth: Number(smoothing),
    range: null,
    rows: {},
    logs: isLog ? [...names] : [],
    trimmed: [],
    hidden: [],
    pinned: [],
    collapsed: [],
  }
  const lines = new Map(
    [...section.querySelectorAll('[data-run-line]')].map(({ dataset }) => [dataset.runLine, dataset]),
  )
  const places = placesOf(ids)
  const draw = () => {
    const known = ids.flatMap((id) => {
      const own = points.get(id)
      return own
        ? [{ id, label: lines.get(id)?.label ?? id, place: places.get(id) ?? 0, group: null, points: own }]
        : []
    })
    if (!known.length) return
    const without = known.filter((run) => !run.points.hasAxis(view.x))
    const note = section.querySelector('[data-unknown]')
    note.hidden = !without.length
    note.textContent = `Not drawn, because they have no ${titleOf(view.x)}: ${without.map(({ label }) => label).join(', ')}`
    for (const panel of panels)
      panel.draw({ runs: known.filter((run) => !without.includes(run)), view: { ...view }, band: 'range' })
  }
  const axis = x.startsWith('metric:') ? [x.slice('metric:'.length)] : []
  const { points, fetchSeries } = seriesOf(report.dataset.api, view, () => [...names, ...axis], draw)
  const panels = rows.map((element) =>
    createRunPanel(element, {
      view,
      runsOf: (row, some) => (row === 'scale' ? some.filter(({ id }) => lines.get(id)?.scaled !== undefined) : some),
      onPoint: (at) => {
        for (const panel of panels) panel.point(at)
      },
      onView: (isRange) => {
        draw()
        if (isRange) fetchSeries(ids)
      },
    }),
  )
  const panelOf = (row) => panels.find(({ name }) => name === row)
  createPanelMenu(
    section,
    `report-${section.dataset.reportPanel}`,
    {
      panelOf,
      mode: () => view.x,
      picture: (file, format, row) => panelOf(row)?.savePicture(file, format),
      view,
      onAxis: draw,
    },
    undefined,
    undefined,
    report.querySelector('[data-panel-menu]'),
  )
  let isDrawn = false
  waiting.set(section, () => {
    isDrawn = true
    fetchSeries(ids)
  })
  observer.observe(section)
  return {
    ids,
    /** @param {string[]} some of its runs, which changed */
    refresh: async (some) => {
      if (isDrawn) await fetchSeries(some)
    },
  }
}
