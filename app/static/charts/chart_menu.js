// The menu of each panel: pinning its metric, and files of what it shows.
import { placeBelow, toggleFullScreen } from 'menus'
import { setLog, setRange, setTrimmed, unkept } from 'panel_axes'
import { askRange, showTable } from 'panel_dialogs'

/** @param {string} name @param {string} type @param {BlobPart} content */
const download = (name, type, content) => {
  const link = Object.assign(document.createElement('a'), {
    href: URL.createObjectURL(new Blob([content], { type })),
    download: name,
  })
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 1000)
}

/** @param {string} text */
const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text)

/** A text that a spreadsheet would take for a formula, as text. @param {string} text */
const harmless = (text) => (/^[=+\-@\t\r]/.test(text) ? `'${text}` : text)

/**
 * Return the drawn values of lines as CSV, as they were sent.
 * @param {{name: string, x: number[], y: (number|null)[]}[]} lines
 * @param {string} mode
 */
const csvOf = (lines, mode) =>
  [['line', mode, 'value'], ...lines.flatMap(({ name, x, y }) => x.map((at, i) => [harmless(name), at, y[i] ?? '']))]
    .map((row) => row.map((each) => quoted(String(each))).join(','))
    .join('\n')

/**
 * The menu of a panel, opened by the button in its head.
 * @param {HTMLElement} section
 * @param {string} name of the files
 * @param {{
 *   panelOf: (row: string) => {row: {metric?: string, isLog?: boolean}, element: HTMLElement, drawn: any}|undefined,
 *   mode: () => string,
 *   picture: (name: string, format: 'png'|'svg', row: string) => void,
 *   hide?: (row: string) => void,
 *   view?: import('url_state').View,
 *   onAxis?: () => void
 * }} charts
 * @param {import('panel_axes').Axes & {pinned: string[]}} [arrangement] which is changed
 * @param {() => void} [onArrange]
 * @param {any} [menu] shared by several sections
 */
export const createPanelMenu = (
  section,
  name,
  charts,
  arrangement = unkept(),
  onArrange = () => {},
  menu = section.querySelector('[data-panel-menu]'),
) => {
  const item = (label, act) => {
    const made = Object.assign(document.createElement('button'), { type: 'button', textContent: label })
    made.addEventListener('click', () => {
      menu.hidePopover()
      act()
    })
    return made
  }
  const axis = (row) => {
    const view = /** @type {import('url_state').View} */ (charts.view)
    const isLog = view.logs.includes(row)
    return item(isLog ? 'Linear axis' : 'Log axis', () => {
      setLog(row, !isLog, view, arrangement)
      onArrange()
      charts.onAxis?.()
    })
  }
  /** @param {string} row @param {Found} element */
  const fixed = (row, element) =>
    item('Fix y range…', () => {
      const view = /** @type {import('url_state').View} */ (charts.view)
      const { range, type } = /** @type {any} */ (element.querySelector('.plot'))._fullLayout.yaxis2
      const isLog = type === 'log'
      askRange(
        element.getAttribute('aria-label') ?? row,
        isLog ? range.map((exponent) => 10 ** exponent) : range,
        { isLog, isFixed: row in view.rows },
        (wanted) => {
          setRange(
            row,
            /** @type {[number, number]|null} */ (wanted && isLog ? wanted.map(Math.log10) : wanted),
            view,
            arrangement,
          )
          onArrange()
          charts.onAxis?.()
        },
      )
    })
  const outliers = (row) => {
    const view = /** @type {import('url_state').View} */ (charts.view)
    const isTrimmed = view.trimmed.includes(row)
    return item(isTrimmed ? 'Show outliers' : 'Ignore outliers', () => {
      setTrimmed(row, !isTrimmed, view, arrangement)
      onArrange()
      charts.onAxis?.()
    })
  }
  const pin = (metric) => {
    const isPinned = arrangement.pinned.includes(metric)
    return item(isPinned ? 'Unpin' : 'Pin to the top', () => {
      if (isPinned) arrangement.pinned.splice(arrangement.pinned.indexOf(metric), 1)
      else arrangement.pinned.push(metric)
      onArrange()
    })
  }
  const home = menu.parentElement
  section.addEventListener('click', ({ target }) => {
    const button = /** @type {Found} */ (target).closest('[data-more]')
    if (!button) return
    const row = button.closest('[data-row]').dataset.row
    const panel = /** @type {any} */ (charts.panelOf(row))
    if (!panel) return
    const file = `${name}-${row.replaceAll('/', '-')}`
    menu.replaceChildren(
      ...(panel.row.metric ? [pin(panel.row.metric)] : []),
      ...(!charts.view || panel.row.isLog ? [] : [axis(row)]),
      ...(charts.view && panel.drawn ? [fixed(row, panel.element), outliers(row)] : []),
      item(document.fullscreenElement ? 'Leave full screen' : 'Full screen', () => toggleFullScreen(panel.element)),
      ...(row === 'parallel'
        ? []
        : [
            item('Show as table', () =>
              showTable(panel.element.getAttribute('aria-label') ?? row, panel.drawn?.lines ?? [], charts.mode()),
            ),
          ]),
      item('Save as PNG', () => charts.picture(file, 'png', row)),
      item('Save as SVG', () => charts.picture(file, 'svg', row)),
      item('Save as CSV', () => download(`${file}.csv`, 'text/csv', csvOf(panel.drawn?.lines ?? [], charts.mode()))),
      ...(charts.hide ? [item('Hide', () => charts.hide?.(row))] : []),
    )
    ;(document.fullscreenElement ?? home).append(menu) // outside of what is in full screen nothing can be pressed
    menu.showPopover()
    placeBelow(menu, button)
  })
}
