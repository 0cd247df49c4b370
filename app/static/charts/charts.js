// The only place that touches Plotly. Draws when on screen, as often as drawing is cheap.
import { pause } from 'http'
import { figure, PICTURE_MARGIN } from 'figure'
import { still } from 'dom_updates'

/** Of runs side by side: ten, and beyond as many again, dashed. */
const RUNS = Object.fromEntries(Array.from({ length: 10 }, (_, i) => [`run${i}`, `--run-${i}`]))
const COLORS = { ...RUNS, loss: '--chart-loss', val: '--chart-val', scale: '--chart-scale', norm: '--chart-norm', lr: '--chart-lr', data: '--chart-data', skip: '--chart-skip', text: '--text', quiet: '--quiet', card: '--card', edge: '--quiet', grid: '--line' }
/** Drawing may take this share of the time, painting by the browser not counted. */
const SHARE = 0.14
/** Pixels of a picture of one row. */
const ROW_PICTURE = 360
/** After a failure, as when plotly did not load. */
const RETRY_MS = 1000

// Plotly brings a style sheet for maps, unless an element has its id. We draw none, and let no script
// bring style sheets.
document.head.append(Object.assign(document.createElement('meta'), { id: '9f215cf04c5486422605d13261cb87401f4e7763b6296af81e98efbc0130da53' }))

/** Colours of the theme as plain rgb: Plotly knows no light-dark(). @param {HTMLElement} element */
const themeColors = (element) => {
  const probe = element.appendChild(document.createElement('i'))
  const colors = Object.fromEntries(Object.entries(COLORS).map(([name, property]) => {
    probe.style.color = `var(${property})`
    return [name, getComputedStyle(probe).color]
  }))
  probe.remove()
  return colors
}

/**
 * Keep a plot drawn: when on screen, in the colours of the theme, as often as drawing is cheap.
 * @param {Found} plot
 * @param {(wanted: any, colors: Record<string, string>) => {data: any[], layout: any, drawn: number}} compose drawn: how much there is to see, for who waits for it
 * @param {() => void} [onFirst]
 */
const painter = (plot, compose, onFirst = () => {}) => {
  let wanted = null // what to draw next
  let shown = null
  let isVisible = false
  let isBusy = false
  let colors = themeColors(plot.parentElement)
  let width = 0 // that it was drawn for

  const draw = async () => {
    // While Chromium takes a picture of the whole page a plot may have no width.
    if (!wanted || !isVisible || !plot.clientWidth || document.hidden || isBusy) return
    isBusy = true
    let [rest, next] = [RETRY_MS, null]
    try {
      if (!window.Plotly) await import('plotly')
      if (!plot.clientWidth) return
      next = wanted
      wanted = null
      const start = performance.now()
      const { data, layout, drawn } = compose(next, colors)
      width = plot.clientWidth
      const height = `${layout.height}px`
      if (getComputedStyle(plot).height !== height) still(() => { plot.style.height = height })
      const drawing = window.Plotly.react(plot, data, { ...layout, width }, { displayModeBar: false, scrollZoom: false, doubleClick: 'autosize' })
      await Promise.race([drawing, pause()])
      if (!shown) onFirst()
      shown = next
      plot.dataset.drawn = String(drawn)
      const cost = performance.now() - start
      rest = cost / SHARE - cost
    } catch (error) {
      wanted ??= next
      throw error
    } finally {
      setTimeout(() => { isBusy = false; draw() }, rest)
    }
  }
  const redraw = () => {
    colors = themeColors(plot.parentElement)
    wanted ??= shown
    draw()
  }
  // What it tells at once may be several changes, the newest last.
  new IntersectionObserver((entries) => { isVisible = entries.at(-1).isIntersecting; draw() }, { rootMargin: '100px' }).observe(plot)
  // Plotly's own way would forget the height, and leave as many points as there were.
  new ResizeObserver(() => { if (plot.clientWidth && plot.clientWidth !== width) redraw() }).observe(plot)
  document.addEventListener('visibilitychange', draw)
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw)
  return (asked) => { wanted = asked; draw() }
}

/** @param {Found} plot @param {string} name @param {any} [layout] what is otherwise than on the page @param {'png'|'svg'} [format] @param {any[]} [data] */
const savePicture = (plot, name, layout = {}, format = 'png', data = plot.data) => window.Plotly.downloadImage(
  { data, layout: { ...plot.layout, ...layout } }, { format, scale: format === 'png' ? 2 : 1, filename: name })

/** A picture has the labels of x itself, which the page has in a strip. @param {Found} plot @param {import('axis').Axis} axis @param {string} background */
const wholePicture = (plot, { title }, background) => ({
  margin: PICTURE_MARGIN, height: plot.layout.height + PICTURE_MARGIN.b - plot.layout.margin.b, paper_bgcolor: background,
  xaxis: { ...plot.layout.xaxis, showticklabels: true, title: { text: title, standoff: 6 } },
})

/** One row of a plot, the n-th from above, by itself. @param {Found} plot @param {number} n @param {any} layout */
const rowPicture = (plot, n, layout) => {
  const [axis, title] = [plot.layout[`yaxis${n + 2}`], plot.layout.annotations[n]]
  const others = Object.fromEntries(Object.keys(plot.layout).filter((name) => /^yaxis\d/.test(name)).map((name) => [name, undefined]))
  return {
    data: plot.data.filter(({ yaxis }) => yaxis === `y${n + 2}`).map((trace) => ({ ...trace, yaxis: 'y2' })),
    layout: { ...layout, ...others, height: ROW_PICTURE, shapes: [], annotations: [{ ...title, y: 1 }], xaxis: { ...layout.xaxis, anchor: 'y2' }, yaxis2: { ...axis, domain: [0, 1] } },
  }
}

/** The axes that a person changed: x, and rows by name; null: all there is. @param {Record<string, any>} change as Plotly tells of it @param {string[]} rows */
export const zoomed = (change, rows) => {
  /** @param {string} axis @returns {Range|null|undefined} */
  const of = (axis) => {
    /** @type {Range} */
    const range = [change[`${axis}.range[0]`], change[`${axis}.range[1]`]]
    if (range.every(Number.isFinite)) return range
    return change[`${axis}.autorange`] ? null : undefined
  }
  const those = rows.map((name, i) => [name, of(`yaxis${i + 2}`)]).filter(([, range]) => range !== undefined)
  return of('xaxis') !== undefined || those.length ? { x: of('xaxis'), rows: Object.fromEntries(those) } : null
}

/**
 * @param {Found} plot
 * @param {{scaled: boolean, timed: boolean, onZoom: (x: Range|null|undefined, rows: Record<string, Range|null>) => void, onDraw: (composed: any) => void, onPoint: (x: number|null) => void}} options
 * scaled: whether there is a loss scale; timed: whether what steps wait for data will be known; onZoom is told the axes that changed, rows by name; null: all there is; onPoint where somebody points, null: nowhere
 * @typedef {import('url_state').Range} Range
 */
export const createCharts = (plot, { scaled, timed, onZoom, onDraw, onPoint }) => {
  let rows = []
  /** What is drawn. @type {ReturnType<typeof figure>|null} */
  let last = null
  let background = ''
  const listen = () => {
    plot.on('plotly_relayout', (change) => {
      const zoom = zoomed(change, rows)
      if (zoom) onZoom(zoom.x, zoom.rows)
    })
    plot.on('plotly_hover', ({ xvals }) => onPoint(xvals[0]))
    plot.on('plotly_unhover', () => onPoint(null))
  }
  const compose = ({ points, view }, colors) => {
    const composed = figure(points, view, colors, { scaled, timed }, plot.clientWidth)
    rows = composed.rows
    last = composed
    background = colors.card
    onDraw(composed)
    return { ...composed, drawn: points.count }
  }
  const paint = painter(plot, compose, listen)

  return {
    /** @param {import('points').Points} points @param {import('url_state').View} view */
    draw: (points, view) => paint({ points, view }),
    composed: () => last,
    /** @param {string} name @param {'png'|'svg'} format @param {string|null} row its name; null: all of them */
    savePicture: (name, format, row) => {
      if (!last || !window.Plotly) return
      const layout = wholePicture(plot, last.axis, background)
      const one = row && rowPicture(plot, rows.indexOf(row), layout)
      savePicture(plot, name.replaceAll('/', '-'), one ? one.layout : layout, format, one ? one.data : plot.data)
    },
  }
}

/** A plot of its own kind. @param {Found} plot @param {Parameters<typeof painter>[1]} compose @param {Record<string, (event: any) => void>} [listeners] by Plotly's name of the event */
export const createPlot = (plot, compose, listeners = {}) => ({
  draw: painter(plot, compose, () => Object.entries(listeners).forEach(([name, listener]) => plot.on(name, listener))),
  /** @param {string} name @param {any} [layout] */
  savePicture: (name, layout) => savePicture(plot, name, layout),
})
