// Panels of several runs: one figure each, with a crosshair through all of them.
import { painter, savePicture, zoomed } from 'charts'
import { ALWAYS_LOG, runsFigure } from 'comparison'
import { place, pointedAt, snapped, valueAt } from 'crosshair'
import { escaped, number, scale as scaleText } from 'formats'

const DIGITS = 3 // of the values of many runs beside each other
/** X axes with whole numbers. */
const WHOLE = ['step', 'applied', 'examples']

/** @typedef {import('url_state').View} View */

/**
 * A panel whose element is there already.
 * @param {Found} element
 * @param {{
 *   view: View,
 *   runsOf?: (row: string, runs: any[]) => any[],
 *   onPoint: (x: number|null) => void,
 *   onLine?: (id: string|undefined) => void,
 *   onView: (isRange: boolean) => void
 * }} options
 * runsOf: the runs that a panel draws; onPoint: a pointer is at x; onLine: at the line of a run; onView: the view was
 * zoomed
 */
export const createRunPanel = (element, { view, runsOf = (_, runs) => runs, onPoint, onLine = () => {}, onView }) => {
  const plot = element.querySelector('.plot')
  const { row: name, title } = element.dataset
  const readout = element.querySelector('[data-pointed]')
  /** @type {any} */
  let drawn = null
  let [isPointed, width] = [false, 0]
  /** @type {string|undefined} */
  let forward
  const values = element.querySelector('[data-values]')
  /** The values of all runs, at a place or at their ends. @param {number|null} x */
  const showValues = (x) => {
    if (!values || !drawn) return
    const lines = drawn.recorded()
    const key = JSON.stringify([drawn.strokes, lines.map(({ run }) => run.label), width])
    const isNew = values.dataset.key !== key
    if (isNew) {
      values.dataset.key = key
      values.replaceChildren(
        ...lines.map(({ run }, i) => {
          const item = Object.assign(document.createElement('span'), { title: run.label })
          item.append(
            Object.assign(document.createElement('i'), { style: `background: ${drawn.strokes[i].color}` }),
            Object.assign(document.createElement('span'), { textContent: run.label }),
            Object.assign(document.createElement('span'), { textContent: run.id ?? run.label }),
            document.createElement('b'),
          )
          return item
        }),
      )
    }
    lines.forEach((line, i) => {
      const text = x !== null && x > line.x.at(-1) ? '–' : valueAt(line, x, DIGITS)
      const cell = values.children[i].lastElementChild
      if (cell.innerHTML !== text) cell.innerHTML = text
    })
    // Where a panel has no room for labels, the numbers of the runs stand for them.
    if (!isNew) return
    element.classList.remove('numbered')
    element.classList.toggle('numbered', values.scrollHeight > values.clientHeight)
  }
  /** The run that is pointed at is seen before the others. */
  const arrange = () => {
    for (const trace of plot.querySelectorAll('.scatterlayer .trace')) {
      const isOwn = forward !== undefined && [...trace.classList].some((each) => each.startsWith(`tracerun${forward}-`))
      trace.classList.toggle('behind', forward !== undefined && !isOwn)
      if (isOwn) trace.parentElement.append(trace)
    }
  }
  const compose = (wanted, colors, size) => {
    drawn = runsFigure({ ...wanted, runs: runsOf(name, wanted.runs), row: { name, title } }, colors, size)
    width = size.width
    element.toggleAttribute('data-blank', !drawn.lines.length)
    if (!isPointed) readout.textContent = drawn.signs
    showValues(null)
    requestAnimationFrame(arrange)
    return drawn
  }
  const draw = painter(plot, compose, () => {
    plot.querySelector('[data-static-chart]')?.remove()
    plot.on('plotly_hover', ({ points: [{ curveNumber, y }] }) => {
      const { run, label } = drawn.entries[curveNumber] ?? {}
      isPointed = Boolean(label)
      readout.innerHTML = label ? `${escaped(label)}: ${name === 'scale' ? scaleText(y) : number(y)}` : drawn.signs
      onLine(run?.id)
    })
    plot.on('plotly_unhover', () => {
      isPointed = false
      readout.textContent = drawn.signs
      onLine(undefined)
    })
    plot.on('plotly_relayout', (change) => {
      const zoom = zoomed(change, name, plot)
      if (!zoom) return
      if (zoom.x !== undefined) view.range = zoom.x
      const range = zoom.rows[name]
      if (range) view.rows[name] = range
      else if (range === null) delete view.rows[name]
      onView(zoom.x !== undefined)
    })
  })
  plot.addEventListener('mousemove', (event) => {
    const x = drawn && pointedAt(event, plot, drawn)
    const at = x === null || !drawn ? null : snapped(drawn, x)
    onPoint(at !== null && WHOLE.includes(view.x) ? Math.round(at) : at) // a mean has points in between
  })
  plot.addEventListener('mouseleave', () => onPoint(null))
  return {
    name,
    element,
    draw,
    row: { metric: undefined, isLog: ALWAYS_LOG.includes(name) },
    get drawn() {
      return drawn
    },
    /** @param {number|null} x */
    point: (x) => {
      place(element.querySelector('.crosshair'), drawn, x, view.x)
      showValues(x)
    },
    /** @param {string} [id] of a run */
    bringForward: (id) => {
      forward = id
      arrange()
    },
    /** @param {string} file @param {'png'|'svg'} format */
    savePicture: (file, format) => {
      if (!drawn) return
      savePicture(
        plot,
        file,
        {
          margin: { l: 62, r: 22, t: 36, b: 66 },
          height: drawn.layout.height + 100,
          paper_bgcolor: getComputedStyle(element).backgroundColor,
          title: { text: element.getAttribute('aria-label'), font: { size: 13 }, x: 0.02 },
          showlegend: true,
          legend: { orientation: 'h', y: -0.18 },
        },
        format,
      )
    },
  }
}
