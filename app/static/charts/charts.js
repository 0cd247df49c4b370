// The only place that touches Plotly. Draws when on screen, all plots of a page together.
import { pause } from 'http'
import { draw, drawFirst } from 'snapshots'
import { still } from 'dom_updates'

/** Colors of compared runs: ten, and ten more with dashes. */
const RUNS = Object.fromEntries(Array.from({ length: 10 }, (_, i) => [`run${i}`, `--run-${i}`]))
const COLORS = {
  ...RUNS,
  loss: '--chart-loss',
  val: '--chart-val',
  scale: '--chart-scale',
  norm: '--chart-norm',
  lr: '--chart-lr',
  data: '--chart-data',
  skip: '--chart-skip',
  good: '--good',
  text: '--text',
  quiet: '--quiet',
  card: '--card',
  edge: '--quiet',
  grid: '--chart-grid',
}
/** Configuration of a plot for its first drawing only, because Plotly would compare it each time. */
const CONFIG = { displayModeBar: false, scrollZoom: false, doubleClick: 'autosize', showTips: false }
/** After a failure. */
const RETRY_MS = 1000

// Plotly brings a style sheet for maps, unless an element has its id. We draw none, and let no script
// bring style sheets.
document.head.append(
  Object.assign(document.createElement('meta'), {
    id: '9f215cf04c5486422605d13261cb87401f4e7763b6296af81e98efbc0130da53',
  }),
)

/** Colors of the current theme; reading each one restyles the page. @type {Record<string, string>|null} */
let known = null
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  known = null
})
document.addEventListener('themechange', () => {
  known = null
})
/** Colours of the theme as plain rgb: Plotly does not support light-dark(). */
const themeColors = () => {
  if (known) return known
  const probe = document.body.appendChild(document.createElement('i'))
  known = Object.fromEntries(
    Object.entries(COLORS).map(([name, property]) => {
      probe.style.color = `var(${property})`
      return [name, getComputedStyle(probe).color]
    }),
  )
  probe.remove()
  return known
}

/** Load Plotly, which takes its time. */
export const library = async () => {
  while (!window.Plotly) await import('plotly').catch(() => pause())
}

/**
 * Keep a plot drawn: when on screen, in the colours of the theme, together with all others.
 * @param {Found} plot
 * @param {(wanted: any, colors: Record<string, string>, size: {width: number, height: number}) => {
 *   data: any[],
 *   layout: any,
 *   drawn: number,
 *   isFitted?: boolean
 * }} compose size: of the element in pixels; drawn: how much there is to see, for who waits for it;
 * isFitted: as high as its element, which else becomes as high as the figure
 * @param {() => void} [onFirst]
 */
export const painter = (plot, compose, onFirst = () => {}) => {
  let wanted = null // what to draw next
  let shown = null
  let isVisible = false
  let colors = themeColors()
  let size = { width: 0, height: 0 } // of the element, as observed
  let drawnSize = size
  // Reading it from the element between two drawings lays out the page, and Plotly reads it at each drawing.
  Object.defineProperties(plot, { clientWidth: { get: () => size.width }, clientHeight: { get: () => size.height } })

  const paint = () => {
    // While Chromium takes a picture of the whole page a plot may have no width.
    if (!wanted || !isVisible || !size.width || document.hidden) return
    const next = wanted
    wanted = null
    try {
      const { data, layout, drawn, isFitted } = compose(next, colors, size)
      const own = `${layout.height}px`
      if (!isFitted && layout.height && plot.style.height !== own)
        still(() => {
          plot.style.height = own
        })
      drawnSize = isFitted ? size : { ...size, height: layout.height ?? size.height }
      window.Plotly.react(plot, data, { ...layout, width: size.width }, shown ? undefined : CONFIG)
      if (!shown) onFirst()
      shown = next
      plot.dataset.drawn = String(drawn)
    } catch (error) {
      wanted ??= next
      setTimeout(request, RETRY_MS)
      reportError(error)
    }
  }
  const request = async () => {
    if (!wanted || !isVisible) return
    if (!window.Plotly) await library()
    if (shown) draw(paint)
    else drawFirst(paint)
  }
  const redraw = () => {
    colors = themeColors()
    wanted ??= shown
    request()
  }
  new IntersectionObserver(
    (entries) => {
      isVisible = entries.at(-1).isIntersecting // it may report several changes at once, the newest last
      if (shown)
        paint() // at once: what comes into view shows what all others do
      else request()
    },
    { rootMargin: '100px' },
  ).observe(plot)
  // Plotly's own way would forget the height, and leave as many points as there were.
  new ResizeObserver((entries) => {
    const { width, height } = entries[entries.length - 1].contentRect
    size = { width: Math.round(width), height: Math.round(height) }
    if (size.width && (size.width !== drawnSize.width || size.height !== drawnSize.height)) redraw()
  }).observe(plot)
  document.addEventListener('visibilitychange', request)
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw)
  document.addEventListener('themechange', redraw)
  return (asked) => {
    wanted = asked
    request()
  }
}

/**
 * @param {Found} plot
 * @param {string} name
 * @param {any} [layout] what is otherwise than on the page
 * @param {'png'|'svg'} [format]
 * @param {any[]} [data]
 */
export const savePicture = (plot, name, layout = {}, format = 'png', data = plot.data) =>
  window.Plotly.downloadImage(
    { data, layout: { ...plot.layout, ...layout } },
    { format, scale: format === 'png' ? 2 : 1, filename: name },
  )

/** @param {any} plot @param {Range} x @param {Range} y logarithms on such an axis */
const hasPoint = ({ data, layout }, [first, last], [low, high]) =>
  data.some((line) =>
    line.x?.some((x, i) => {
      const y = layout.yaxis2.type === 'log' ? Math.log10(line.y[i]) : line.y[i]
      return first <= x && x <= last && low <= y && y <= high
    }),
  )

/**
 * Axes changed by the user: x, and the row; null: the whole range.
 * @param {Record<string, any>} change as Plotly reports it
 * @param {string} row
 * @param {any} plot whose points are drawn: a box without any was meant along x
 */
export const zoomed = (change, row, plot) => {
  /** @param {string} axis @returns {Range|null|undefined} */
  const of = (axis) => {
    /** @type {Range} */
    const range = [change[`${axis}.range[0]`], change[`${axis}.range[1]`]]
    if (range.every(Number.isFinite)) return range
    return change[`${axis}.autorange`] ? null : undefined
  }
  const [x, y] = [of('xaxis'), of('yaxis2')]
  const range = x && y && !hasPoint(plot, x, y) ? undefined : y
  return x !== undefined || range !== undefined ? { x, rows: range === undefined ? {} : { [row]: range } } : null
}

/** @typedef {import('url_state').Range} Range */

/**
 * A plot of its own kind.
 * @param {Found} plot
 * @param {Parameters<typeof painter>[1]} compose
 * @param {Record<string, (event: any) => void>} [listeners] by Plotly's name of the event
 */
export const createPlot = (plot, compose, listeners = {}) => ({
  draw: painter(plot, compose, () => Object.entries(listeners).forEach(([name, listener]) => plot.on(name, listener))),
  /** @param {string} name @param {any} [layout] @param {'png'|'svg'} [format] */
  savePicture: (name, layout, format) => savePicture(plot, name, layout, format),
})

/**
 * A plot as high as its element.
 * @param {Found} plot
 * @param {(wanted: any, colors: Record<string, string>) => {data: any[], layout: any, drawn: number}} compose
 * @param {Record<string, (event: any) => void>} [listeners]
 */
export const fittedPlot = (plot, compose, listeners) =>
  createPlot(
    plot,
    (wanted, colors, size) => ({ ...compose({ ...wanted, ...size }, colors), isFitted: true }),
    listeners,
  )
