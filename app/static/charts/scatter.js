// One number of each run against another, a dot a run: settings that differ, and figures; next to it
// all settings beside one of them; and a dot a run of one figure.
import { dotTicks, logAxis } from 'axis'
import { fittedPlot } from 'charts'
import { strokeOf } from 'comparison'
import { duration, escaped, number, size } from 'formats'
import { parallelFigure } from 'parallel'
import { placesOf } from 'run_colors'

const FIGURES = {
  'run/step_ms': 'Time per step, ms',
  'run/seconds': 'Training time, s',
  'run/peak_memory_bytes': 'Peak memory, bytes',
  seconds: 'Time with setup, s',
  loss: 'Last loss',
}
const LOG_FROM = 20 // how many times the smallest the largest is, for a log axis

/**
 * Return the columns that can be drawn, by name, with a value per run, and the names of numeric ones.
 * @param {any} found as /api/v1/comparison answers
 */
const columnsOf = ({ runs, differences }) => {
  /** @type {Map<string, any[]>} */
  const columns = new Map(Object.entries(differences))
  /** @type {Map<string, string>} */
  const figures = new Map()
  const add = (name, values, figure) => {
    if (!values.some((value) => typeof value === 'number')) return
    columns.set(name, values)
    figures.set(name, figure)
  }
  const names = [...new Set(runs.flatMap(({ figures }) => Object.keys(figures)))]
  for (const name of names) {
    add(
      FIGURES[name] ?? name,
      runs.map(({ figures }) => figures[name]?.value),
      name,
    )
    add(
      name === 'loss' ? 'Lowest loss' : `${name}, best`,
      runs.map(({ best }) => best[name]?.value),
      name,
    )
  }
  add(
    'Skipped steps',
    runs.map(({ run }) => run.skipped),
    'skipped',
  )
  add(
    'Steps',
    runs.map(({ run }) => run.step),
    'steps',
  )
  return { columns, figures }
}

/** A number with its unit, as the table below has it. @param {string} figure @param {number} value */
const withUnit = (figure, value) => {
  if (figure.endsWith('_bytes')) return size(value)
  if (figure === 'run/step_ms') return duration(value / 1000)
  return ['run/seconds', 'seconds'].includes(figure) ? duration(value) : number(value)
}

/** Dots of more runs go without names; a long name gives way to the run's number. */
const [NAMED, LONG] = [12, 20]
/** @param {string} id @param {Record<string, string>} labels */
const shortened = (id, labels) => (labels[id].length > LONG ? `run ${id}` : labels[id])

/** Mean and standard deviation of a sample. @param {string} name @param {{id: string, value: number}[]} members */
const rowOf = (name, members) => {
  const mean = members.reduce((sum, { value }) => sum + value, 0) / members.length
  const squares = members.reduce((sum, { value }) => sum + (value - mean) ** 2, 0)
  return { name, members, mean, deviation: members.length > 1 ? Math.sqrt(squares / (members.length - 1)) : 0 }
}

/** @param {any[]} values */
const axisOf = (values, title, colors) => {
  const numbers = values.filter((value) => typeof value === 'number')
  const isNumeric = numbers.length === values.filter((value) => value !== null && value !== undefined).length
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)]
  const isLog = isNumeric && low > 0 && high / low >= LOG_FROM
  const type = isLog ? 'log' : isNumeric ? 'linear' : 'category'
  return {
    type,
    title: { text: escaped(isLog ? `${title} (log)` : title), standoff: 8 },
    gridcolor: colors.grid,
    zeroline: false,
    automargin: true,
    ...(low >= 0 && { rangemode: 'nonnegative' }),
    ...(isLog && logAxis(numbers)),
  }
}

const word = (value) =>
  typeof value === 'number' || value === null || value === undefined ? value : escaped(String(value).slice(0, 40))

const scatterFigure = ({ ids, labels, across, up, columns, height }, colors) => {
  const [x, y] = [across, up].map((name) => (columns.get(name) ?? []).map(word))
  const places = placesOf(ids)
  const placeOf = (id) => places.get(id) ?? 0
  const data = ids
    .map((id, i) => ({
      x: [x[i]],
      y: [y[i]],
      name: escaped(labels[id]),
      type: 'scatter',
      mode: ids.length > NAMED ? 'markers' : 'markers+text',
      cliponaxis: false,
      text: [escaped(shortened(id, labels))],
      textposition: 'middle right',
      textfont: { size: 11, color: colors.text },
      marker: {
        size: 11,
        color: strokeOf(placeOf(id), colors).color,
        symbol: Math.floor(placeOf(id) / 10),
        line: { width: 1, color: colors.card },
      },
      hovertemplate: `%{fullData.name}<br>%{x}, %{y}<extra></extra>`,
    }))
    .filter(({ x: [a], y: [b] }) => a !== null && a !== undefined && b !== null && b !== undefined)
  const layout = {
    margin: { l: 64, r: ids.length > NAMED ? 24 : 90, t: 12, b: 46 },
    height,
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
    showlegend: false,
    hovermode: 'closest',
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    xaxis: axisOf(x, across, colors),
    yaxis: axisOf(y, up, colors),
  }
  return { data, layout, drawn: data.length }
}

/**
 * @param {HTMLElement} article @param {string[]} ids @param {Record<string, string>} labels
 * @param {{low: string[], paint: () => void}} options low: figures of which lower is better; paint: give samples of
 *   lines their colours
 */
export const createScatter = (article, ids, labels, { low, paint: color }) => {
  const box = article.querySelector('[data-scatter]')
  if (!box) return { draw: () => {}, choose: () => {}, group: () => {} }
  const [plot, parallelPlot] = [
    fittedPlot(box.querySelector('[data-scatter-plot]'), scatterFigure),
    fittedPlot(box.querySelector('[data-parallel-plot]'), parallelFigure),
  ]
  const [dots, note] = ['dots', 'dots-note'].map((name) => article.querySelector(`[data-${name}]`))
  const places = placesOf(ids)
  /** Group of each run if groups have means, else null. @type {Map<string, string>|null} */
  let groups = null
  const selects = ['across', 'up', 'figure'].map(
    (name) => /** @type {any} */ (article.querySelector(`[data-choice=${name}]`)),
  )
  const [across, up, figure] = selects
  /** @type {Map<string, any[]>} */
  let columns = new Map()
  /** @type {Map<string, string>} */
  let figures = new Map()
  /** @type {string[]} */
  let settings = []

  /**
   * Show a row of dots for each run, or for each group with its mean. The axis covers the data's range; the best row is
   * first if it is known which way is better.
   */
  const showDots = () => {
    const own = figures.get(figure.value) ?? ''
    const known = ids
      .map((id, i) => ({ id, value: columns.get(figure.value)?.[i], group: groups?.get(id) }))
      .filter(({ value }) => typeof value === 'number')
    const rows = groups
      ? [...Map.groupBy(known, ({ group }) => group)].map(([name, members]) => rowOf(String(name), members))
      : known.map((each) => rowOf(labels[each.id], [each]))
    rows.sort((a, b) => (low.includes(own) || own === 'skipped' ? a.mean - b.mean : b.mean - a.mean))
    const ticks = dotTicks(
      rows.flatMap(({ members, mean, deviation }) => [
        ...members.map(({ value }) => value),
        mean - deviation,
        mean + deviation,
      ]),
    )
    const at = (value) => `${Math.round((1000 * (value - ticks[0])) / (ticks[ticks.length - 1] - ticks[0])) / 10}%`
    const mark = (className, value, id) =>
      `<i class="${className} line-${(places.get(id) ?? 0) % 10}" style="left: ${at(value)}"></i>`
    dots.replaceChildren(
      ...rows.map(({ name, members, mean, deviation }) => {
        const item = document.createElement('li')
        const { id } = members[0]
        const isMean = members.length > 1
        const band = isMean
          ? `<i class="band line-${(places.get(id) ?? 0) % 10}" style="left: ${at(mean - deviation)}; width: calc(${at(mean + deviation)} - ${at(mean - deviation)})"></i>`
          : ''
        item.innerHTML = `<span class="track">${band}${isMean ? members.map(({ value }) => mark('seed', value, id)).join('') : ''}${mark('dot', mean, id)}</span><b>${withUnit(own, mean)}${isMean ? ` <small>± ${withUnit(own, deviation)}</small>` : ''}</b>`
        item.prepend(Object.assign(document.createElement('span'), { textContent: name, title: name }))
        return item
      }),
      Object.assign(document.createElement('li'), {
        className: 'axis',
        innerHTML: `<span></span><span class="track">${[ticks[0], ticks[ticks.length - 1]].map((end) => `<span style="left: ${at(end)}">${withUnit(own, end)}</span>`).join('')}</span><b></b>`,
      }),
    )
    dots.lastElementChild.ariaHidden = 'true'
    note.textContent = [
      ...(ticks[0] > 0 ? [`The axis begins at ${withUnit(own, ticks[0])}, at the data.`] : []),
      ...(rows.some(({ members }) => members.length > 1) ? ['Small dots: runs. Band: mean ± standard deviation.'] : []),
    ].join(' ')
    color()
  }
  const paint = () => {
    if (!columns.size) return
    plot.draw({ ids, labels, columns, across: across.value, up: up.value })
    parallelPlot.draw({ ids, labels, columns, settings, up: up.value })
    showDots()
  }
  const choose = (choices) => {
    const names = [...columns.keys()]
    const numeric = names.find((name) => columns.get(name)?.every((value) => typeof value === 'number'))
    const runsWith = (name) => columns.get(name)?.filter((value) => typeof value === 'number').length ?? 0
    // The metric of the address, else what most runs have.
    const asked = new URLSearchParams(location.search).get('metric')
    const isAsked = (name) => Number(figures.get(name) === asked)
    const bests = [...figures.keys()].filter((name) => isAsked(name) || name.endsWith(', best'))
    const best =
      [...bests, ...names.filter((name) => name === 'Lowest loss')].sort(
        (a, b) => isAsked(b) - isAsked(a) || runsWith(b) - runsWith(a),
      )[0] ?? names.at(-1)
    const usual = [numeric ?? names[0], names.includes('Lowest loss') ? 'Lowest loss' : names.at(-1), best]
    selects.forEach((select, i) => {
      const offered = select === figure ? [...figures.keys()] : names
      const wanted = choices[select.dataset.choice] ?? usual[i]
      const known = [...select.options].map(({ value }) => value)
      if (known.join('\n') !== offered.join('\n'))
        select.replaceChildren(...offered.map((name) => new Option(name, name)))
      select.value = offered.includes(wanted) ? wanted : usual[i]
    })
    paint()
  }
  return {
    /** Show a mean of each group. @param {Map<string, string>|null} by the group of each run */
    group: (by) => {
      groups = by
      if (columns.size) showDots()
    },
    /** @param {any} found @param {Record<string, string>} choices of the address */
    draw: (found, choices) => {
      ;({ columns, figures } = columnsOf(found))
      settings = Object.keys(found.differences)
      choose(choices)
    },
    choose,
  }
}
