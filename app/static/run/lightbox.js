// A picture of a run, as large as the window: arrow keys lead through all of them, by name and step.

/** @typedef {{address: string, caption: string}} Picture */

/** @param {Found} section whose pictures open it @param {() => Picture[]} pictures in order */
export const createLightbox = (section, pictures) => {
  /** @type {Picture[]} */
  let all = []
  let at = 0
  const dialog = /** @type {Found & HTMLDialogElement} */ (
    /** @type {unknown} */ (
      Object.assign(document.createElement('dialog'), {
        className: 'lightbox',
        innerHTML:
          '<figure><img alt=""></figure><p class="quiet" role="status"></p><div class="inline"><button type="button" data-step="-1">Previous</button><button type="button" data-step="1">Next</button><a class="button" download>Download</a><button type="button" class="end" data-close>Close</button></div>',
      })
    )
  )
  dialog.setAttribute('aria-label', 'Picture')
  document.body.append(dialog)

  /** @param {number} place */
  const show = (place) => {
    at = (place + all.length) % all.length
    const { address, caption } = all[at]
    Object.assign(dialog.querySelector('img'), { src: address, alt: caption })
    dialog.querySelector('[role=status]').textContent = `${caption} · ${at + 1} of ${all.length}`
    dialog.querySelector('a').href = address
  }
  dialog.addEventListener('click', ({ target }) => {
    const button = /** @type {Found} */ (target).closest('button')
    if (button?.dataset.step) show(at + Number(button.dataset.step))
    else if (button || target === dialog) dialog.close()
  })
  dialog.addEventListener('keydown', ({ key }) => {
    if (key === 'ArrowLeft') show(at - 1)
    if (key === 'ArrowRight') show(at + 1)
  })
  section.addEventListener('click', ({ target }) => {
    const picture = /** @type {Found} */ (target).closest('.picture')?.querySelector('img')
    if (!picture) return
    all = pictures()
    const place = all.findIndex(({ address }) => address === picture.getAttribute('src'))
    if (place < 0) return
    show(place)
    dialog.showModal()
  })
}
